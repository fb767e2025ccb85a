"""What a run tells the caller while it goes on; this watcher is silent, a display overrides it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tether.ppo.scoring import Trial
from tether.run.metrics import Event

E = TypeVar("E")  # what an evaluation of this kind of training finds


@dataclass(frozen=True)
class Sample:
    """One response of an iteration. `score` is None where the reward gave none."""

    prompt: str
    response: str
    score: float | None


@dataclass(frozen=True)
class IterationRecord:
    """What a watcher is told about an iteration. Small: with Ray it is sent to the driver."""

    iteration: int
    metrics: Mapping[str, float]
    timings: Mapping[str, float]
    events: Sequence[Event] = ()
    sample: Sample | None = None


class Watcher(Generic[E]):
    """Do nothing at every step of a run; override the methods of interest."""

    def reading(self, path: str, rows: int) -> None:
        """Called while a data file is read; `rows` of it have been."""

    def preparing(self, what: str) -> None:
        """Called while files are hashed, if that takes long."""

    def started(self, run: Path, iterations: int) -> None:
        """Called once the run's directory is there."""

    def resumed(self, iterations_done: int, checkpoint: Path | None) -> None:
        """Called where a run goes on; without a checkpoint it begins again."""

    def warned(self, warning: str) -> None:
        """Called with a sentence about something unusual."""

    def checked(self, findings: str) -> None:
        """Called with what the self-check before the first iteration found."""

    def tried(self, trial: Trial) -> None:
        """Called for each row that the reward was tried on before training."""

    def evaluating(self, rows: int) -> None:
        """Called before an evaluation on so many held-out prompts."""

    def evaluated(self, evaluation: E) -> None:
        """Called with what an evaluation found."""

    def iterated(self, record: IterationRecord) -> None:
        """Called after each iteration, once its lines are in the run's files."""
