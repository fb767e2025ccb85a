"""The order of the stages; each begins with what the one before left behind."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from tether import api
from tether.config import Config
from tether.errors import RunStopped
from tether.pipeline.layout import Layout
from tether.pipeline.preferences import write_demonstrations, write_pairs, write_questions
from tether.pipeline.report import Standing, stand
from tether.run.directory import create_run_directory
from tether.stages import PipelineConfig
from tether.train.loop import Result
from tether.train.stage import StageResult, StageWatcher, refuse_several
from tether.train.watch import Watcher

Ended = TypeVar("Ended", Result, StageResult)


class PipelineWatcher:
    """Whoever watches the stages; this one is silent."""

    def began(self, what: str) -> None: ...

    def stage(self) -> StageWatcher:
        return StageWatcher()

    def ppo(self, config: Config) -> Watcher:
        return Watcher()


@dataclass(frozen=True)
class Report:
    run: Path
    sft: Standing
    ppo: Standing


def run_pipeline(config: PipelineConfig, watch: PipelineWatcher) -> Report:
    refuse_several("tether train with a recipe of several stages")
    Layout(config, Path()).check()
    layout = Layout(config, create_run_directory(config.run.dir, config.run.name or "rlhf", False))
    (layout.run / "recipe.yaml").write_text(config.to_yaml(), encoding="utf-8")
    write_demonstrations(layout)
    write_questions(layout)

    watch.began("SFT on demonstrations")
    sft = _whole(api.sft(layout.sft_config(), watch.stage())).checkpoint / "actor"
    watch.began("pairs of SFT's responses, compared with noise")
    write_pairs(layout, sft)
    watch.began("reward model on pairs")
    trained = _whole(api.reward_model(layout.reward_model_config(sft), watch.stage()))
    watch.began("PPO against the reward model")
    ppo = layout.ppo_config(sft, trained.checkpoint / "reward")
    result = _whole(api.train(ppo, watch=watch.ppo(ppo)))
    watch.began("true preference on held-out questions")
    actor = Path(api.model_path(str(layout.ppo)))
    report = Report(
        layout.run,
        sft=stand(layout, sft, sft, result.before),
        ppo=stand(layout, actor, sft, result.after),
    )
    text = json.dumps({"sft": asdict(report.sft), "ppo": asdict(report.ppo)}, indent=1)
    (layout.run / "report.json").write_text(text + "\n", encoding="utf-8")
    return report


def _whole(ended: Ended) -> Ended:
    """A stage that a signal ended is no ground for the next one."""
    if ended.interrupted is not None:
        raise RunStopped(
            f"Stopped by {ended.interrupted.name}; what was done is in {ended.run}, and the stages "
            f"after it were not begun."
        )
    return ended
