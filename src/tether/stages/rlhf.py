"""The generated task as files: demonstrations, questions, and labelled pairs of responses."""

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tether.algo.random import uniform
from tether.config import Config
from tether.config.load import validate_config
from tether.config.stages import PipelineConfig, RewardModelConfig, SFTConfig
from tether.data.files import read_rows
from tether.data.messages import render_prompt
from tether.errors import RunStopped
from tether.models.loading import load_causal_lm
from tether.models.vocabulary import load_vocabulary
from tether.ppo.evaluate import Evaluation, wilson
from tether.ppo.roles import pick_device
from tether.rollout.local import LocalSampler
from tether.rollout.sampler import Draw, SingleTurn
from tether.run.checkpoint_store import latest_checkpoint
from tether.run.directory import create_run_directory
from tether.stages.loop import StageResult, StageWatcher, refuse_several, run_stage
from tether.stages.reward_model import build_reward_model
from tether.stages.sft import build_sft
from tether.tasks.arithmetic import Split
from tether.tasks.courtesy import (
    Question,
    count_yes,
    demonstrate,
    draw_questions,
    is_right,
    utility,
)
from tether.train.loop import Result
from tether.train.session import start
from tether.train.watch import Watcher


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


BATCH = 512  # responses sampled together
SPLITS: tuple[Split, ...] = ("train", "heldout")


def write_demonstrations(layout: Layout) -> None:
    for split, size in _sizes(layout.config, layout.config.task.demonstrations):
        rng = random.Random(f"demonstrations {split} {layout.config.seed}")
        questions = take_questions(rng, split, size)
        rows = [
            {**question.row(), "response": demonstrate(question, rng)} for question in questions
        ]
        layout.write("demonstrations", split, rows)


def write_questions(layout: Layout) -> None:
    for split, size in _sizes(layout.config, layout.config.task.questions):
        rng = random.Random(f"questions {split} {layout.config.seed}")
        layout.write("questions", split, [q.row() for q in take_questions(rng, split, size)])


def write_pairs(layout: Layout, sft: Path) -> None:
    """Two responses of the SFT policy to each question, compared by people who err."""
    config = layout.config
    for split, size in _sizes(config, config.task.pairs):
        rng = random.Random(f"pairs {split} {config.seed}")
        questions = take_questions(rng, split, size)
        twice = [question for question in questions for _ in range(2)]
        texts = sample_texts(config, sft, twice, f"pairs {split}")
        luck = uniform(config.seed, f"labels {split}", np.arange(size)).tolist()
        compared = zip(questions, texts[::2], texts[1::2], luck, strict=True)
        layout.write(
            "pairs",
            split,
            [
                label(question, first, second, config.task.noise, u)
                for question, first, second, u in compared
                if first.strip() and second.strip() and first != second
            ],
        )


def take_questions(rng: random.Random, split: Split, size: int) -> list[Question]:
    return list(itertools.islice(draw_questions(rng, split), size))


def label(question: Question, first: str, second: str, noise: float, u: float) -> dict[str, str]:
    """The first is chosen with probability sigmoid(difference in true utility / noise)."""
    difference = utility(first, question) - utility(second, question)
    likes_first = u < 1 / (1 + math.exp(-difference / noise))
    chosen, rejected = (first, second) if likes_first else (second, first)
    return {"prompt": question.prompt, "chosen": chosen, "rejected": rejected}


def sample_texts(
    config: PipelineConfig, model: Path, questions: Sequence[Question], purpose: str
) -> list[str]:
    """One response a question; what is drawn depends on the seed and the purpose."""
    network = load_causal_lm(str(model), "float32", pick_device(config.device))
    vocabulary = load_vocabulary(str(model), network)
    sampler = LocalSampler(vocabulary.eos_ids, config.task.max_response_tokens, 1.0)
    sampler.sync(network, 0)
    turns = [SingleTurn(render_prompt(vocabulary.tokenizer, q.prompt)) for q in questions]
    texts = []
    for first in range(0, len(turns), BATCH):
        rollout = sampler.run(turns[first : first + BATCH], Draw(config.seed, purpose, first))
        rows = zip(rollout.response_ids.tolist(), rollout.response_lengths.tolist(), strict=True)
        texts += [vocabulary.decode(ids[:length]) for ids, length in rows]
    return texts


def _sizes(config: PipelineConfig, train: int) -> list[tuple[Split, int]]:
    return list(zip(SPLITS, (train, config.task.heldout), strict=True))


@dataclass(frozen=True)
class Standing:
    """A policy on the held-out questions, one sampled response each."""

    reward: float  # by the reward model, in standard deviations of SFT's
    kl: float | None  # to SFT, in nats a response
    utility: float  # true
    right: float  # share of right numbers
    greeted: float  # share with a yes in the language of the question
    wins: float  # against SFT by the true preference; a tie counts half
    wins_low: float  # 95% interval, Wilson's
    wins_high: float
    questions: int


def stand(layout: Layout, policy: Path, rival: Path, evaluation: Evaluation) -> Standing:
    """`evaluation` is PPO's own of that policy; the true preference is asked here."""
    questions = [Question(**row) for row in read_rows(str(layout.file("questions", "heldout")))]
    texts = sample_texts(layout.config, policy, questions, "stand")
    rivals = sample_texts(layout.config, rival, questions, "rival")
    asked = list(zip(questions, texts, strict=True))
    count = len(questions)
    wins = won(
        [utility(text, q) for q, text in asked],
        [utility(text, q) for q, text in zip(questions, rivals, strict=True)],
    )
    low, high = wilson(wins, count)
    return Standing(
        reward=evaluation.sampled.mean,
        kl=evaluation.kl,
        utility=math.fsum(utility(text, q) for q, text in asked) / count,
        right=sum(is_right(text, q) for q, text in asked) / count,
        greeted=sum(count_yes(text, q) > 0 for q, text in asked) / count,
        wins=wins,
        wins_low=low,
        wins_high=high,
        questions=count,
    )


def won(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Share of comparisons that are won; a tie counts half."""
    points = [(a > b) + 0.5 * (a == b) for a, b in zip(ours, theirs, strict=True)]
    return sum(points) / len(points)


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
    sft = _whole(run_stage(layout.sft_config(), build_sft, watch.stage())).checkpoint / "actor"
    watch.began("pairs of SFT's responses, compared with noise")
    write_pairs(layout, sft)
    watch.began("reward model on pairs")
    wanted = layout.reward_model_config(sft)
    trained = _whole(run_stage(wanted, build_reward_model, watch.stage()))
    watch.began("PPO against the reward model")
    ppo = layout.ppo_config(sft, trained.checkpoint / "reward")
    result = _whole(start(ppo, None, watch.ppo(ppo), resume=False, allow_changed=False))
    watch.began("true preference on held-out questions")
    actor = latest_checkpoint(layout.ppo) / "actor"
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
