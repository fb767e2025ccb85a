"""What the session and the loop ask of a kind of training: PPO, SFT, reward modelling.

A `Job` is what to train, before anything is loaded. It builds a `Training`: models, data and
optimizers, which the loop drives iteration by iteration and whose state a checkpoint holds.
"""

import datetime
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.config import Config, LaunchSection
from tether.config.stages import RewardModelConfig, SFTConfig
from tether.data.prompts import OnProgress
from tether.dist.interrupt import Interrupt
from tether.ppo.evaluate import Evaluation
from tether.ppo.result import Outcome
from tether.ppo.scoring import Trial
from tether.run.directory import CHECKPOINTS
from tether.run.metrics import Event
from tether.run.rows import Row, read_rows
from tether.support import html
from tether.train.watch import IterationRecord, Watcher

AnyConfig = Config | SFTConfig | RewardModelConfig
E = TypeVar("E")  # what an evaluation finds
E_co = TypeVar("E_co", covariant=True)


@dataclass(frozen=True)
class Iterated:
    """One iteration: the record for the watcher, and what else the run's files get."""

    record: IterationRecord
    rollouts: Sequence[Mapping[str, Any]] = ()  # rows of rollouts/, where they are due
    prompts_sha256: str | None = None  # of the prompts' token ids, which a resume compares
    # Where in the data they are, and how many, if that does not follow from the iteration.
    prompts_window: tuple[int, int] | None = None
    prompts_rows: Sequence[int] | None = None  # by a curriculum
    notices: Sequence[Event] = ()  # signs that nothing can be learnt any more
    no_progress: str | None = None  # why no step was taken: numbers that were not finite
    outcome: Outcome | None = None  # its tensors, in PPO
    samplers: Mapping[str, Any] | None = None  # what samplers apart did, and when


@dataclass(frozen=True)
class Evaluated(Generic[E_co]):
    """One evaluation: what was found, and the same as a line of evals.jsonl."""

    found: E_co
    line: Mapping[str, Any]
    responses: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Event] = ()


@dataclass(frozen=True)
class SavedModel:
    """A model that a checkpoint holds as a Hugging Face directory."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds: all that the next iteration depends on but the position."""

    models: Mapping[str, SavedModel]  # by folder
    tensors: Mapping[str, Mapping[str, Tensor]]  # by file
    state: Mapping[str, Any]  # plain numbers


@dataclass(frozen=True)
class Result(Generic[E_co]):
    """How a run ended. `before` is None without held-out rows, `after` also if interrupted."""

    run: Path
    iterations_done: int
    before: E_co | None
    after: E_co | None
    train_seconds: float
    interrupted: signal.Signals | None
    resumed_from: int = 0  # iterations that were done before this attempt

    @property
    def checkpoint(self) -> Path:
        """The newest one: a run that ends or is interrupted saves its state."""
        return self.run / CHECKPOINTS / f"{self.iterations_done:06d}"

    def rows(self, iteration: int | None = None) -> Sequence[Row]:
        """Read the rows that the run holds of an iteration; by default of its newest."""
        return read_rows(self.run, iteration)

    def _repr_html_(self) -> str:
        told = f"{self.iterations_done} iterations, {self.train_seconds:.0f} s of training"
        if self.interrupted is not None:
            told += f", stopped by {self.interrupted.name}"
        before, after = (_summary(found) for found in (self.before, self.after))
        names = dict.fromkeys([*before, *after])
        rows = [[name, before.get(name, "–"), after.get(name, "–")] for name in names]
        table = html.table([["held-out", "before", "after"], *rows]) if rows else ""
        return html.paragraph(f"{told}; everything is in {self.run}") + table


def _summary(evaluation: object) -> dict[str, str]:
    """Return what an evaluation of any kind found, as texts."""
    if isinstance(evaluation, Evaluation):
        return evaluation.summary()
    if isinstance(evaluation, Mapping):  # of SFT or a reward model
        numbers = {k: v for k, v in evaluation.items() if isinstance(v, int | float)}
        return {str(k): html.number(v) for k, v in numbers.items() if k != "iteration"}
    return {}


@runtime_checkable
class Training(Protocol[E_co]):
    """A loaded training. Every process of a run has one."""

    @property
    def config(self) -> AnyConfig:
        """The settings as resolved, with the day that the chat template is told."""
        ...

    @property
    def iterations(self) -> int: ...

    @property
    def heldout_rows(self) -> int:
        """Rows of an evaluation; 0 where there is nothing to evaluate on."""
        ...

    @property
    def bad_rows(self) -> Sequence[str]:
        """Rows of data that were left out, and why."""
        ...

    @property
    def checkpoint_bytes(self) -> int: ...

    @property
    def checkpoints_kept(self) -> int: ...

    def try_out(self) -> Sequence[Trial]:
        """Try the reward on a few rows, before a new run is created."""
        ...

    def changed_rows(self, run: Path) -> list[str]:
        """Name rows of past iterations that would be drawn differently now."""
        ...

    def log_into(self, run: Path) -> None:
        """Keep what user code prints in the run's directory."""
        ...

    def ablations(self) -> Sequence[str]:
        """Name settings that are known to be wrong and were asked for."""
        ...

    def check(self, fresh: bool) -> str | None:
        """Check that the parts agree before the first iteration; return what was found."""
        ...

    def iterate(self, iteration: int, interrupt: Interrupt) -> Iterated:
        """Do one iteration. It may be dropped until `interrupt.hold()` is called."""
        ...

    def evaluate(self, iterations_done: int) -> Evaluated[E_co]: ...

    def learning_modules(self) -> Mapping[str, nn.Module]:
        """Return what learns, by role."""
        ...

    def contents(self) -> Contents: ...

    def load(self, checkpoint: Path) -> None:
        """Restore what `contents` returned when the checkpoint was written."""
        ...

    def checkpoints_to_keep(self, run: Path) -> Sequence[Path]: ...

    def close(self) -> None: ...


@runtime_checkable
class Job(Protocol[E]):
    """What to train: a config and what it names, before anything is loaded."""

    @property
    def config(self) -> AnyConfig: ...

    @property
    def run_name(self) -> str:
        """The NAME in runs/NAME-001."""
        ...

    @property
    def launch(self) -> LaunchSection:
        """How processes share the work."""
        ...

    @property
    def rows(self) -> int:
        """Rows of an iteration, which processes share."""
        ...

    @property
    def on_ray(self) -> bool: ...

    @property
    def python_reward(self) -> bool:
        """Whether the reward is a function of the caller's, which no file holds."""
        ...

    def dated(self, day: datetime.date | None) -> "Job[E]":
        """Return the job with the day that its chat template is told."""
        ...

    def input_files(self) -> Iterator[tuple[str, dict[str, Path]]]:
        """Yield, by config field, the files that the training reads, by their names."""
        ...

    def planned_iterations(self, state: Mapping[str, Any]) -> int:
        """Return the iterations of the whole run; `state` is that of its newest checkpoint."""
        ...

    def read_evaluations(self, run: Path) -> dict[int, E]:
        """Read evals.jsonl back, by the iterations that were done."""
        ...

    def build(self, reading: OnProgress | None) -> Training[E]:
        """Load and check models and data; nothing is trained yet."""
        ...

    def start_on_ray(self, watch: Watcher[E], resume: bool, allow_changed: bool) -> Result[E]:
        """Run in workers that Ray places; only where `on_ray`."""
        ...


def is_due(iteration: int, every: int) -> bool:
    """Return whether a cadence falls on this iteration; 0 = never."""
    return every > 0 and iteration % every == 0
