"""Scorers: a reward applied to the rows of a rollout, and what went wrong for each row."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tether.data.batching import own_rows
from tether.dist.collectives import gather_results
from tether.errors import UserError, describe
from tether.models.forward import Network
from tether.rewards.functions import Reward, RewardPart, judge_row
from tether.rewards.values import LARGEST_SCORE, RowReward, Said, WrongType, add_rewards
from tether.support.child_output import ChildOutput
from tether.support.child_process import Answer, ChildFailed, ChildProcess, ChildTimedOut
from tether.support.user_code import Sources

IMPORT_SECONDS = 120.0
MAX_ANSWER_BYTES = 1 << 20
NO_OPINION = "the reward returned None"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A row's score, or why there is none.

    A reward that returns None has no opinion. That is not a failure of the function, but the row
    cannot be trained on either.
    """

    score: float | None  # the sum of `reward`
    problem: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # by name, before their weights
    extras: Mapping[str, Any] = field(default_factory=dict)  # what else verl's score dict held
    wrong_type: bool = False  # what came back could not be a score of any row
    reward: RowReward | None = None  # None where all of the score is for the response as a whole

    @staticmethod
    def of(said: Said) -> "Verdict":
        """Return the verdict of a reward that returned something."""
        if said.reward is None:
            return Verdict(None, NO_OPINION, extras=said.extras)
        placed = said.reward if said.reward.by_token else None
        return Verdict(said.reward.total, None, said.parts, said.extras, reward=placed)

    @property
    def placed(self) -> RowReward:
        """Return the score by where it belongs."""
        return self.reward or RowReward(self.score or 0.0)


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

    def score(self, rows: Sequence[Row]) -> list[Verdict]:
        """Return a verdict per row, in their order."""
        ...

    def earned(self, rows: Sequence[Row]) -> list[Verdict] | None:
        """Return what rows that were cut off have earned before that; None where a score is only of
        a response that has ended."""
        return None

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


def score_across_processes(
    rows: Sequence[Row], score: Callable[[Sequence[Row]], list[Verdict]]
) -> list[Verdict]:
    """Return verdicts in row order; each process scores a block of the rows."""
    mine = own_rows(len(rows))
    blocks = gather_results(lambda: score(rows[mine.start : mine.stop]))
    return [verdict for block in blocks for verdict in block]


class InProcessScorer(Scorer):
    """Call a function that exists only in this process (notebooks, closures). No time limit."""

    def __init__(self, function: Reward) -> None:
        self.function = function

    def score(self, rows: Sequence[Row]) -> list[Verdict]:
        return score_across_processes(rows, lambda mine: [self._score_row(row) for row in mine])

    def _score_row(self, row: Row) -> Verdict:
        try:
            # A copy: rows of one prompt share what is inside their columns.
            verdict = Verdict.of(judge_row(self.function, copy.deepcopy(dict(row))))
        except WrongType as error:
            return Verdict(None, str(error), wrong_type=True)
        except (Exception, SystemExit) as error:  # a reward may raise anything; the row is named
            return Verdict(None, describe(error))
        return fitting(verdict, row)


class ChildScorer(Scorer):
    """Run all parts of a reward in one long-lived child.

    When a row hangs or kills the child, a new child continues after that row. It runs the same
    reward: files that were edited since the first child started stop the run.
    """

    def __init__(
        self,
        parts: Sequence[RewardPart],
        timeout_seconds: float,
        import_seconds: float = IMPORT_SECONDS,
    ) -> None:
        self.parts = parts
        self.timeout_seconds = timeout_seconds
        self.import_seconds = import_seconds
        self.output = ChildOutput()
        self.child: ChildProcess | None = None
        self.sources = Sources(part.kind for part in parts)

    def score(self, rows: Sequence[Row]) -> list[Verdict]:
        return score_across_processes(rows, self._score)

    def _score(self, rows: Sequence[Row]) -> list[Verdict]:
        lines = [json.dumps(row) for row in rows]
        verdicts: list[Verdict] = []
        while len(verdicts) < len(rows):
            child = self.child = self.child or self._start()
            child.send(lines[len(verdicts) :])
            while len(verdicts) < len(rows) and self.child is not None:
                found, row = self._receive_parts(child), rows[len(verdicts)]
                verdicts.append(weighted_sum(self.parts, [fitting(v, row) for v in found]))
        return verdicts

    def _start(self) -> ChildProcess:
        self.sources.refuse_changed()
        setup = [{"kind": part.kind, "arguments": dict(part.arguments)} for part in self.parts]
        try:
            with self.output.pipe() as output:
                return ChildProcess(
                    "tether.rewards.child",
                    setup,
                    name="the reward",
                    seconds=self.import_seconds,
                    output=output,
                    max_answer_bytes=MAX_ANSWER_BYTES,
                )
        except ChildTimedOut:
            raise UserError(
                f"The reward does not start: {', '.join(part.kind for part in self.parts)} took "
                f"longer to import than reward.import_timeout_seconds = {self.import_seconds:g}; "
                f"raise it, or import less."
            ) from None
        except ChildFailed as error:
            raise UserError(f"The reward does not start: {error}.") from None

    def _receive_parts(self, child: ChildProcess) -> list[Verdict]:
        """Return what each part says of the next row, up to one that ended the child."""
        found: list[Verdict] = []
        for _ in self.parts:
            try:
                found.append(_as_verdict(child.receive(self.timeout_seconds), child))
            except ChildFailed as error:
                self.close()
                late = " (reward.timeout_seconds)" if isinstance(error, ChildTimedOut) else ""
                return [*found, Verdict(None, f"{error}{late}")]
        return found

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child = None
            self.output.settle()

    def log_to(self, path: Path) -> None:
        self.output.keep_in(path)

    def printed(self) -> str:
        return self.output.newest


def _as_verdict(answer: Answer, child: ChildProcess) -> Verdict:
    if isinstance(answer.get("error"), str):
        return Verdict(None, answer["error"], wrong_type=bool(answer.get("wrong_type")))
    try:
        reward, parts, extras = answer["reward"], dict(answer["parts"]), dict(answer["extras"])
        if reward is not None:
            turns, tokens = (tuple(map(float, reward[name])) for name in ("turns", "tokens"))
            reward = RowReward(float(reward["response"]), turns, tokens)
    except (KeyError, TypeError, ValueError):
        raise child.garbled() from None
    return Verdict.of(Said(reward, parts, extras))


def fitting(verdict: Verdict, row: Row) -> Verdict:
    """Return the verdict, or what is wrong where it has numbers for turns or tokens that the row
    does not have."""
    if verdict.reward is None:
        return verdict
    turns, tokens = len(row.get("policy_turns", ())), len(row.get("policy_tokens", ()))
    problem = verdict.reward.problem(turns, tokens)
    return verdict if problem is None else Verdict(None, problem)


class EnvironmentScorer(Scorer):
    """Take the rewards that the environment gave, turn by turn; it has given them already."""

    def score(self, rows: Sequence[Row]) -> list[Verdict]:
        return [self._score_row(row) for row in rows]

    def earned(self, rows: Sequence[Row]) -> list[Verdict]:
        return self.score(rows)

    def _score_row(self, row: Row) -> Verdict:
        given = row.get("turn_rewards", ())
        if not given:
            return Verdict(None, "the environment failed, so the episode has no reward")
        for turn, reward in enumerate(given, start=1):
            if reward is not None and not abs(reward) <= LARGEST_SCORE:
                return Verdict(None, f"the environment gave {reward} for turn {turn}")
        reward = RowReward(turns=tuple(reward or 0.0 for reward in given))
        return fitting(Verdict(reward.total, reward=reward), row)


def weighted_sum(parts: Sequence[RewardPart], verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a whole row from those of its parts.

    Where a part failed there is no sum, and the part is named; `verdicts` may end early with such
    a one.
    """
    terms: list[RowReward] = []
    named: dict[str, float] = {}
    extras: dict[str, Any] = {}
    for part, verdict in zip(parts, verdicts, strict=False):
        if verdict.score is None:
            where = "" if part.name is None else f"part {part.name!r}: "
            return Verdict(None, f"{where}{verdict.problem}", wrong_type=verdict.wrong_type)
        terms.append(verdict.placed.times(part.weight))
        prefix = "" if part.name is None else f"{part.name}."
        extras |= {f"{prefix}{name}": value for name, value in verdict.extras.items()}
        if part.name is not None:
            named[part.name] = verdict.score
        named |= {f"{prefix}{name}": value for name, value in verdict.parts.items()}
    total = add_rewards(terms)
    if not abs(total.total) <= LARGEST_SCORE:
        return Verdict(None, f"the weighted sum of the parts is {total.total:g}")
    placed = total if total.by_token else None
    return Verdict(total.total, parts=named, extras=extras, reward=placed)
