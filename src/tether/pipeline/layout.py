"""Where everything of one pipeline lies, and the config of each stage.

RUN/data/            everything that was generated or sampled, as JSON lines
RUN/sft/             a run of `tether sft`
RUN/reward-model/    a run of `tether reward-model`
RUN/ppo/             a run of `tether train`; a stopped one goes on by `tether resume`
RUN/recipe.yaml      as resolved
RUN/report.json      the closing table
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.config import Config
from tether.recipes import validate_config
from tether.stages import PipelineConfig, RewardModelConfig, SFTConfig


class Layout:
    """The files of a pipeline, and its stages' configs with the fields filled in that only the
    pipeline knows."""

    def __init__(self, config: PipelineConfig, run: Path) -> None:
        self.config, self.run = config, run
        self.sft, self.reward_model, self.ppo = run / "sft", run / "reward-model", run / "ppo"

    def file(self, name: str, split: str) -> Path:
        return self.run / "data" / f"{name}-{split}.jsonl"

    def write(self, name: str, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        path = self.file(name, split)
        path.parent.mkdir(exist_ok=True)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text("".join(lines), encoding="utf-8")

    def check(self) -> None:
        """What is wrong with a later stage's settings is better said before the first."""
        self.sft_config()
        self.reward_model_config(self.sft)
        self.ppo_config(self.sft, self.reward_model)

    def sft_config(self) -> SFTConfig:
        filled = self._filled(self.sft, "demonstrations", {"start": self.config.start})
        return validate_config(merged(self.config.sft, filled), SFTConfig)

    def reward_model_config(self, sft: Path) -> RewardModelConfig:
        filled = self._filled(self.reward_model, "pairs", {"start": str(sft)})
        return validate_config(merged(self.config.reward_model, filled), RewardModelConfig)

    def ppo_config(self, sft: Path, reward: Path) -> Config:
        """The reward model is the reward, and what the critic starts from."""
        filled = {
            **self._filled(self.ppo, "questions", {"actor": str(sft), "critic": str(reward)}),
            "rollout": {"max_response_tokens": self.config.task.max_response_tokens},
            "reward": {"kind": f"model:{reward}"},
        }
        return validate_config(merged(self.config.ppo, filled), Config)

    def _filled(self, run: Path, name: str, model: Mapping[str, str]) -> dict[str, Any]:
        config = self.config
        return {
            "seed": config.seed,
            "device": config.device,
            "threads": config.threads,
            "run": {"dir": str(run)},
            "model": model,
            "data": {split: str(self.file(name, split)) for split in ("train", "heldout")},
        }


def merged(given: Mapping[str, Any], filled: Mapping[str, Any]) -> dict[str, Any]:
    """Sections field by field; what the pipeline fills in wins."""
    result = dict(given)
    for key, value in filled.items():
        inside = isinstance(value, Mapping) and isinstance(given.get(key), Mapping)
        result[key] = merged(given[key], value) if inside else value
    return result
