"""SFT, a reward model and PPO in a row, on generated preferences: `tether train rlhf`.

Each stage is a run in a folder of its own, and what lies between two stages is a file that is there
whole or not at all. So a pipeline that was killed goes on at the stage, or the file, where it
stopped; what is finished is not done again.
"""

import contextlib
import itertools
import json
import math
import os
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tether.algo.random import uniform
from tether.assets import is_shipped
from tether.config import Config
from tether.config.load import read_recipe, validate_config
from tether.config.stages import PipelineConfig, RewardModelConfig, SFTConfig
from tether.data.files import read_rows
from tether.data.messages import render_prompt
from tether.dist.environment import launched_size
from tether.dist.interrupt import Dropped, Interrupt
from tether.errors import RunStopped, UserError, one_line
from tether.models.loading import load_causal_lm
from tether.models.vocabulary import load_vocabulary
from tether.ppo.estimates import wilson
from tether.ppo.evaluate import Evaluation
from tether.ppo.roles import pick_device
from tether.rollout.local import LocalSampler
from tether.rollout.sampler import Draw, SingleTurn
from tether.run.checkpoint_store import sync
from tether.run.directory import RECIPE, create_run_directory, is_pipeline, refuse_taken
from tether.run.lock import RunLock
from tether.run.writer import replace_file
from tether.stages.reward_model import reward_model_job
from tether.stages.sft import sft_job
from tether.stages.training import Record
from tether.tasks.arithmetic import Split
from tether.tasks.courtesy import (
    Question,
    count_yes,
    demonstrate,
    draw_questions,
    is_right,
    utility,
)
from tether.train.checkpoint import load_plain_actor
from tether.train.fingerprint import (
    changed_versions,
    read_fingerprint,
    take_fingerprint,
    versions,
    write_fingerprint,
)
from tether.train.ppo import PPOJob
from tether.train.resume import changed_fields, refuse_changes
from tether.train.session import start
from tether.train.training import Job, Result
from tether.train.watch import Watcher

REPORT = "report.json"
SECTIONS = ("", "sft.", "reward_model.", "ppo.")
E = TypeVar("E")


class Layout:
    """The files of a pipeline, and its stages' configs with the fields filled in that only the
    pipeline knows. Paths are absolute, so that it can be resumed from any folder."""

    def __init__(self, config: PipelineConfig, run: Path) -> None:
        self.config, self.run = config, run
        here = Path(os.path.abspath(run))
        self.sft, self.reward_model, self.ppo = here / "sft", here / "reward-model", here / "ppo"
        self.data = here / "data"

    def file(self, name: str, split: str) -> Path:
        return self.data / f"{name}-{split}.jsonl"

    def write(self, name: str, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_whole(self.file(name, split), "".join(lines), self.run)

    def check(self) -> None:
        """Validate the settings of every stage before the first one starts."""
        self.sft_config()
        self.reward_model_config(self.sft)
        self.ppo_config(self.sft, self.reward_model)

    def sft_config(self) -> SFTConfig:
        model = self.config.start
        if not is_shipped(model) and Path(model).exists():
            model = os.path.abspath(model)
        filled = self._filled(self.sft, "demonstrations", {"start": model})
        return validate_config(merged(self.config.sft, filled), SFTConfig)

    def reward_model_config(self, sft: Path) -> RewardModelConfig:
        filled = self._filled(self.reward_model, "pairs", {"start": str(sft)})
        return validate_config(merged(self.config.reward_model, filled), RewardModelConfig)

    def ppo_config(self, sft: Path, reward: Path) -> Config:
        """Make the reward model the reward, and what the critic starts from."""
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
    """Merge sections field by field; what the pipeline fills in wins."""
    result = dict(given)
    for key, value in filled.items():
        inside = isinstance(value, Mapping) and isinstance(given.get(key), Mapping)
        result[key] = merged(given[key], value) if inside else value
    return result


def write_whole(path: Path, text: str, run: Path) -> None:
    """Write a file that is there whole or not at all, also after a kill."""
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, text)
        sync(path.parent)
    except OSError as error:
        raise RunStopped(
            f"{path} could not be written: {one_line(error).lower()}. Make room, then `tether "
            f"resume {run}` goes on."
        ) from None


BATCH = 512  # responses sampled together
SPLITS: tuple[Split, ...] = ("train", "heldout")


def write_demonstrations(layout: Layout) -> None:
    for split, size in _missing(layout, "demonstrations", layout.config.task.demonstrations):
        rng = random.Random(f"demonstrations {split} {layout.config.seed}")
        questions = take_questions(rng, split, size)
        rows = [
            {**question.row(), "response": demonstrate(question, rng)} for question in questions
        ]
        layout.write("demonstrations", split, rows)


def write_questions(layout: Layout) -> None:
    for split, size in _missing(layout, "questions", layout.config.task.questions):
        rng = random.Random(f"questions {split} {layout.config.seed}")
        layout.write("questions", split, [q.row() for q in take_questions(rng, split, size)])


def write_pairs(layout: Layout, sft: Path) -> None:
    """Sample two responses of the SFT policy to each question; a noisy preference labels them."""
    config = layout.config
    for split, size in _missing(layout, "pairs", config.task.pairs):
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
    """Choose the first with probability sigmoid(difference in true utility / noise)."""
    difference = utility(first, question) - utility(second, question)
    likes_first = u < 1 / (1 + math.exp(-difference / noise))
    chosen, rejected = (first, second) if likes_first else (second, first)
    return {"prompt": question.prompt, "chosen": chosen, "rejected": rejected}


def sample_texts(
    config: PipelineConfig,
    model: Path,
    questions: Sequence[Question],
    purpose: str,
    ppo: Config | None = None,
) -> list[str]:
    """Sample one response per question; what is drawn depends on the seed and the purpose.

    With `ppo`, the config of a PPO run, `model` is a checkpoint of it, which may hold a part.
    """
    device = pick_device(config.device)
    if ppo is not None:
        network, vocabulary = load_plain_actor(model, ppo, "float32", device)
    else:
        network = load_causal_lm(str(model), "float32", device)
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


def _missing(layout: Layout, name: str, train: int) -> list[tuple[Split, int]]:
    """Return the splits of a file that are not written yet, with their sizes."""
    sizes = zip(SPLITS, (train, layout.config.task.heldout), strict=True)
    return [(split, size) for split, size in sizes if not layout.file(name, split).is_file()]


@dataclass(frozen=True)
class Standing:
    """A policy on the held-out questions, one sampled response each."""

    reward: float  # by the reward model, in standard deviations of SFT's
    kl: float | None  # to SFT, in nats per response
    utility: float  # true
    right: float  # share of right numbers
    greeted: float  # share with a yes in the language of the question
    wins: float  # against SFT by the true preference; a tie counts half
    wins_low: float  # 95% interval, Wilson's
    wins_high: float
    questions: int


def stand(
    layout: Layout,
    policy: Path,
    rival: Path,
    evaluation: Evaluation | None,
    ppo: Config | None = None,
) -> Standing:
    """Measure the true preference; `evaluation` is PPO's own of that policy.

    With `ppo`, the config of a PPO run, `policy` is a checkpoint of it.
    """
    assert evaluation is not None  # the pipeline's PPO has held-out questions
    questions = [Question(**row) for row in read_rows(str(layout.file("questions", "heldout")))]
    texts = sample_texts(layout.config, policy, questions, "stand", ppo)
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
    """Return the share of comparisons that are won; a tie counts half."""
    points = [(a > b) + 0.5 * (a == b) for a, b in zip(ours, theirs, strict=True)]
    return sum(points) / len(points)


class PipelineWatcher:
    """Do nothing at every step of a pipeline; override the methods of interest."""

    def began(self, what: str) -> None: ...

    def skipped(self) -> None:
        """Called after `began`, where an earlier attempt has done it all."""

    def stage(self) -> Watcher[Record]:
        return Watcher()

    def ppo(self, config: Config) -> Watcher[Evaluation]:
        return Watcher()


@dataclass(frozen=True)
class Report:
    run: Path
    sft: Standing
    ppo: Standing


class PipelineInterrupted(RunStopped):
    """A signal ended a stage, with its state saved; the stages after it were not begun."""

    def __init__(self, run: Path, number: signal.Signals) -> None:
        super().__init__(
            f"Stopped by {number.name}; all saved. `tether resume {run}` goes on where it stopped."
        )
        self.signal = number


def run_pipeline(
    config: PipelineConfig,
    watch: PipelineWatcher,
    resume: bool = False,
    allow_changed: bool = False,
) -> Report:
    """Run the stages one after the other. With `resume`, a pipeline that is already at `run.dir`
    goes on where it stopped; its finished stages stay as they are."""
    if launched_size() > 1:
        raise UserError(
            f"A recipe of several stages runs in one process, but {launched_size()} were started; "
            f"start it without torchrun."
        )
    Layout(config, Path()).check()
    run = config.run.dir
    if not (resume and run is not None and is_pipeline(run)):
        run = _create(config)
    with RunLock(run):
        _refuse_other_pipeline(run, config, allow_changed)
        return Pipeline(Layout(config, run), watch, allow_changed).run()


def _create(config: PipelineConfig) -> Path:
    settings = config.run
    refuse_taken(settings.dir, settings.overwrite)
    run = create_run_directory(settings.dir, settings.name or config.stage, settings.overwrite)
    with RunLock(run):
        write_fingerprint(run, take_fingerprint(config.to_dict(), ()))
        write_whole(run / RECIPE, config.to_yaml(), run)
    return run


def _refuse_other_pipeline(run: Path, config: PipelineConfig, allow_changed: bool) -> None:
    """Refuse settings or libraries other than those that the finished stages were made with. The
    files that a stage reads are compared by the stage itself."""
    fingerprint = read_fingerprint(run)
    changes = changed_fields(read_recipe(run / RECIPE), config, SECTIONS)
    if fingerprint is not None:
        changes += changed_versions(fingerprint.versions, versions())
    refuse_changes(changes, allow_changed)


class Pipeline:
    """One attempt at the stages of a pipeline."""

    def __init__(self, layout: Layout, watch: PipelineWatcher, allow_changed: bool) -> None:
        self.layout, self.watch, self.allow_changed = layout, watch, allow_changed

    def run(self) -> Report:
        layout, watch = self.layout, self.watch
        report = layout.run / REPORT
        if report.is_file():
            found = json.loads(report.read_text(encoding="utf-8"))
            return Report(layout.run, Standing(**found["sft"]), Standing(**found["ppo"]))
        write_demonstrations(layout)
        write_questions(layout)

        watch.began("SFT on demonstrations")
        job = sft_job(layout.sft_config())
        sft = self._train(job, watch.stage()).checkpoint / "actor"
        watch.began("pairs of SFT's responses, compared with noise")
        if not _missing(layout, "pairs", layout.config.task.pairs):
            watch.skipped()
        with self._sampling():
            write_pairs(layout, sft)
        watch.began("reward model on pairs")
        trained = self._train(reward_model_job(layout.reward_model_config(sft)), watch.stage())
        watch.began("PPO against the reward model")
        ppo = layout.ppo_config(sft, trained.checkpoint / "reward")
        result = self._train(PPOJob(ppo), watch.ppo(ppo))
        watch.began("true preference on held-out questions")
        with self._sampling():
            standings = {
                "sft": stand(layout, sft, sft, result.before),
                "ppo": stand(layout, result.checkpoint, sft, result.after, ppo),
            }
        content = {name: asdict(standing) for name, standing in standings.items()}
        write_whole(report, json.dumps(content, indent=1) + "\n", layout.run)
        return Report(layout.run, **standings)

    def _train(self, job: Job[E], watch: Watcher[E]) -> Result[E]:
        """Start a stage or go on with it; one that is finished is left as it is."""
        run = self.layout.run
        try:
            result = start(job, watch, resume=True, allow_changed=self.allow_changed)
        except RunStopped as stop:  # one command goes on with the stage and with the rest
            text = str(stop).replace(f"tether resume {job.config.run.dir}", f"tether resume {run}")
            stop.args = (text,)
            raise
        if result.interrupted is not None:
            raise PipelineInterrupted(run, result.interrupted)
        if result.resumed_from == result.iterations_done:
            self.watch.skipped()
        return result

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        """Let a signal drop the work inside; what is whole by then is on the disk."""
        interrupt = Interrupt()
        with interrupt, contextlib.suppress(Dropped), interrupt.droppable():
            yield
        if interrupt.signal is not None:
            raise PipelineInterrupted(self.layout.run, interrupt.signal)
