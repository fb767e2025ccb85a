"""Scorers: a reward function applied to the rows of a rollout, and what went wrong for each."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tether.data.batching import own_rows
from tether.dist.collectives import gather_results
from tether.models.forward import Network
from tether.rewards.functions import LARGEST_SCORE, Reward, WrongType, describe, judge_row
from tether.rewards.parts import Part
from tether.rewards.worker import Prints, RewardProcess
from tether.support.user_code import Sources

IMPORT_SECONDS = 120.0


@dataclass(frozen=True)
class Verdict:
    """A row's score, or why there is none. A reward that returns None has no opinion: that is
    no failure of the function, but the row cannot be trained on either."""

    score: float | None
    problem: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # by name, before their weights
    extras: Mapping[str, Any] = field(default_factory=dict)  # what else verl's score dict held
    wrong_type: bool = False  # what came back could not be a score of any row


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of a reward model's scores of the reference's responses."""

    mean: float = 0.0
    std: float = 1.0

    def __call__(self, raw: float) -> float:
        """Return a raw score as deviations from the mean."""
        return (raw - self.mean) / self.std


@runtime_checkable
class Scorer(Protocol):
    """The role of the reward. The defaults are those of a function: no model, no state."""

    def score(self, rows: list[Mapping[str, Any]]) -> list[Verdict]:
        """Return a verdict per row, in their order."""
        ...

    def close(self) -> None:
        """End processes that the scorer has started."""

    def units(self) -> Scale | None:
        """Return what raw scores are divided by; None where they are used as they come."""
        return None

    def networks(self) -> list[Network]:
        """Return the reward model, if there is one."""
        return []

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint restores, as JSON by names of its own."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned; `state` may hold other names beside."""

    def log_to(self, path: Path) -> None:
        """Append to a file what the reward prints."""

    def printed(self) -> str:
        """Return the end of what the reward has printed."""
        return ""


def spread(
    rows: list[Mapping[str, Any]], score: Callable[[list[Mapping[str, Any]]], list[Verdict]]
) -> list[Verdict]:
    """Verdicts in row order; each process scores a block of the rows."""
    mine = own_rows(len(rows))
    parts = gather_results(lambda: score(rows[mine.start : mine.stop]))
    return [verdict for part in parts for verdict in part]


class InProcessScorer(Scorer):
    """For functions that exist only in this process (notebooks, closures). No time limit."""

    def __init__(self, function: Reward) -> None:
        self.function = function

    def score(self, rows: list[Mapping[str, Any]]) -> list[Verdict]:
        return spread(rows, lambda mine: [self._score_row(row) for row in mine])

    def _score_row(self, row: Mapping[str, Any]) -> Verdict:
        try:
            # A copy: rows of one prompt share what is inside their columns.
            score, extras = judge_row(self.function, copy.deepcopy(dict(row)))
        except (Exception, SystemExit) as error:  # whatever it raises, the row is named
            return Verdict(None, describe(error), wrong_type=isinstance(error, WrongType))
        problem = None if score is not None else "the reward returned None"
        return Verdict(score, problem, extras=extras)


class ChildScorer(Scorer):
    """One long-lived child for all parts; when a row hangs it or kills it, a new child goes on
    after that row. It runs the same reward: files that were edited meanwhile stop the run."""

    def __init__(
        self,
        parts: Sequence[Part],
        timeout_seconds: float,
        import_seconds: float = IMPORT_SECONDS,
    ) -> None:
        self.parts = parts
        self.timeout_seconds = timeout_seconds
        self.import_seconds = import_seconds
        self.prints = Prints()
        self.child: RewardProcess | None = None
        self.sources = Sources(part.kind for part in parts)

    def score(self, rows: list[Mapping[str, Any]]) -> list[Verdict]:
        return spread(rows, self._score)

    def _score(self, rows: list[Mapping[str, Any]]) -> list[Verdict]:
        lines = [json.dumps(row) for row in rows]
        verdicts: list[Verdict] = []
        while len(verdicts) < len(rows):
            self.child = self.child or self._start()
            self.child.send(lines[len(verdicts) :])
            verdicts += self._collect(len(rows) - len(verdicts))
        return verdicts

    def _start(self) -> RewardProcess:
        self.sources.refuse_changed()
        return RewardProcess(self.parts, self.import_seconds, self.prints)

    def _collect(self, expected: int) -> list[Verdict]:
        """Verdicts until all are there, or up to and with the row that ended the child."""
        verdicts: list[Verdict] = []
        while len(verdicts) < expected and self.child is not None:
            verdicts.append(weigh(self.parts, self._ask_parts()))
        return verdicts

    def _ask_parts(self) -> list[Verdict]:
        """What each part says of the next row, up to one that ended the child."""
        found: list[Verdict] = []
        late = f"the reward took longer than {self.timeout_seconds:g} s (reward.timeout_seconds)"
        for _ in self.parts:
            answer = self.child.receive(self.timeout_seconds, late)
            if isinstance(answer, str):
                self.close()
                return [*found, Verdict(None, answer)]
            problem = answer.get("error")
            if problem is None and answer.get("score") is None:
                problem = "the reward returned None"
            wrong_type = bool(answer.get("wrong_type"))
            extras = answer.get("extras", {})
            found.append(
                Verdict(answer.get("score"), problem, extras=extras, wrong_type=wrong_type)
            )
        return found

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child = None
            self.prints.settle()

    def log_to(self, path: Path) -> None:
        """Append to a file what the reward prints."""
        self.prints.keep_in(path)

    def printed(self) -> str:
        """Return the end of what the reward has printed."""
        return self.prints.newest


def weigh(parts: Sequence[Part], verdicts: Sequence[Verdict]) -> Verdict:
    """The weighted sum of one row's parts. Where a part failed there is no sum, and it is named;
    `verdicts` may end early with such a one."""
    for part, verdict in zip(parts, verdicts, strict=False):
        if verdict.score is None:
            whose = "" if part.name is None else f"part {part.name!r}: "
            return Verdict(None, f"{whose}{verdict.problem}", wrong_type=verdict.wrong_type)
    total = sum(p.weight * v.score for p, v in zip(parts, verdicts, strict=True))
    if not abs(total) <= LARGEST_SCORE:
        return Verdict(None, f"the weighted sum of the parts is {total:g}")
    named = {p.name: v.score for p, v in zip(parts, verdicts, strict=True) if p.name is not None}
    extras = {
        name if p.name is None else f"{p.name}.{name}": value
        for p, v in zip(parts, verdicts, strict=True)
        for name, value in v.extras.items()
    }
    return Verdict(total, parts=named, extras=extras)
