"""Scorers: a reward applied to the rows of a rollout, and what went wrong for each row."""

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from tether.dist.collectives import all_or_error, exchange, gather, gather_sharing
from tether.dist.rows import block
from tether.dist.world import REWARDS, waiting_for, world
from tether.models.forward import Network
from tether.rewards.functions import Answer, ReadyReward, Reward, RewardPart, Row, failure
from tether.rewards.values import LARGEST_SCORE, RowReward, Said, add_rewards
from tether.support.background_loop import wait_for

NO_OPINION = "the reward returned None"
T = TypeVar("T")


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
    abstains: bool = False  # the row is for other parts of the reward to score

    @staticmethod
    def of(said: Said) -> "Verdict":
        """Return the verdict of a reward that returned something."""
        if said.reward is None:
            return Verdict(None, NO_OPINION, extras=said.extras)
        placed = said.reward if said.reward.by_token else None
        return Verdict(said.reward.total, None, said.parts, said.extras, reward=placed)

    @staticmethod
    def of_answer(answer: Answer) -> "Verdict":
        """Return the verdict of an answer. One of another shape raises KeyError, TypeError,
        ValueError or AttributeError."""
        if isinstance(answer.get("error"), str):
            return Verdict(None, answer["error"], wrong_type=bool(answer.get("wrong_type")))
        reward = answer["reward"]
        if reward is not None:
            turns, tokens = (tuple(map(float, reward[name])) for name in ("turns", "tokens"))
            reward = RowReward(float(reward["response"]), turns, tokens)
        verdict = Verdict.of(Said(reward, dict(answer["parts"]), dict(answer["extras"])))
        return replace(verdict, abstains=bool(answer.get("abstains")))

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


@dataclass(frozen=True)
class Batch:
    """Where the rows of a call of `score` are from."""

    numbers: Sequence[int]  # of each row among those of all processes
    iteration: int = 0
    samples: int = 1  # rows of a prompt, whose numbers are neighbours

    def select(self, start: int, stop: int) -> "Batch":
        """Return that of some neighbours."""
        return Batch(self.numbers[start:stop], self.iteration, self.samples)

    def prompts(self) -> list[range]:
        """Return the rows of each prompt, as places in `numbers`."""
        places = range(len(self.numbers))
        groups = groupby(places, key=lambda i: self.numbers[i] // self.samples)
        return [range(rows[0], rows[-1] + 1) for rows in (list(group) for _, group in groups)]


@runtime_checkable
class Scorer(Protocol):
    """The role of the reward. The defaults are those of a function: no model, no state."""

    def score(self, rows: Sequence[Row], batch: Batch | None = None) -> list[Verdict]:
        """Return a verdict per row, in their order. Without a batch each row is a prompt."""
        ...

    def earned(self, rows: Sequence[Row], batch: Batch | None = None) -> list[Verdict] | None:
        """Return what rows that were cut off have earned before that; None where a score is only of
        a response that has ended."""
        return None

    def accept(self) -> None:
        """Take note that the run goes on with the verdicts of the last `score`."""

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

    def record_in(self, path: Path) -> None:
        """Append to a file what servers say, and take from it what they said before."""

    def printed(self) -> str:
        """Return the end of what the reward has printed."""
        return ""


def score_across_processes(
    rows: Sequence[Row],
    batch: Batch | None,
    score: Callable[[Sequence[Row], Batch], list[T]],
) -> list[T]:
    """Return what `score` says of each of this process's rows. Those of a prompt are scored by one
    process: the one that has the first of them gets the texts of the others."""
    batch = batch or Batch(range(len(rows)))
    here = world()
    with waiting_for(REWARDS):
        if here.size == 1:
            return score([*rows], batch)
        mine = block(len(rows), here.rank % here.sharing, here.sharing)
        numbers = batch.numbers[mine.start : mine.stop]
        prompts = [number // batch.samples for number in numbers]
        who = _first_to_have(gather(prompts))
        made = all_or_error(lambda: [*rows[mine.start : mine.stop]])
        asked: list[list[tuple[int, Row]]] = [[] for _ in range(here.size)]
        for number, prompt, row in zip(numbers, prompts, made, strict=True):
            asked[who[prompt]].append((number, row))
        given = exchange(asked)
        askers = {number: rank for rank, part in enumerate(given) for number, _ in part}
        by_number = sorted(chain.from_iterable(given), key=lambda pair: pair[0])
        whole = replace(batch, numbers=[number for number, _ in by_number])
        found = all_or_error(lambda: score([row for _, row in by_number], whole))
        answers: list[list[tuple[int, T]]] = [[] for _ in range(here.size)]
        for number, said in zip(whole.numbers, found, strict=True):
            answers[askers[number]].append((number, said))
        verdicts = dict(chain.from_iterable(exchange(answers)))
        own = [verdicts[number] for number in numbers]
        return [*chain.from_iterable(gather_sharing(own))]


def _first_to_have(prompts: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return for each prompt the first process that has a row of it."""
    found: dict[int, int] = {}
    for rank, some in enumerate(prompts):
        for prompt in some:
            found.setdefault(prompt, rank)
    return found


class PartScorer(Scorer):
    """A scorer of some parts of the reward; the score is their weighted sum."""

    parts: Sequence[RewardPart]

    def verdicts(self, rows: Sequence[Row], batch: Batch) -> list[list[Verdict]]:
        """Return per row of this process a verdict of every part."""
        raise NotImplementedError

    def score(self, rows: Sequence[Row], batch: Batch | None = None) -> list[Verdict]:
        return score_across_processes(rows, batch, self._sums)

    def _sums(self, rows: Sequence[Row], batch: Batch) -> list[Verdict]:
        found = self.verdicts(rows, batch)
        return [
            weighted_sum(self.parts, [fitting(v, row) for v in verdicts])
            for row, verdicts in zip(rows, found, strict=True)
        ]


class SumScorer(PartScorer):
    """Several scorers, each of some of the parts of one reward."""

    def __init__(self, scorers: Sequence[PartScorer]) -> None:
        self.scorers = scorers
        self.parts = [part for scorer in scorers for part in scorer.parts]

    def verdicts(self, rows: Sequence[Row], batch: Batch) -> list[list[Verdict]]:
        found = [scorer.verdicts(rows, batch) for scorer in self.scorers]
        return [[v for verdicts in of_row for v in verdicts] for of_row in zip(*found, strict=True)]

    def earned(self, rows: Sequence[Row], batch: Batch | None = None) -> list[Verdict] | None:
        """Return what the environment gave, if it is among the parts; the others are for whole
        responses."""
        found = [earned for s in self.scorers if (earned := s.earned(rows, batch)) is not None]
        return found[0] if found else None

    def accept(self) -> None:
        for scorer in self.scorers:
            scorer.accept()

    def close(self) -> None:
        for scorer in self.scorers:
            scorer.close()

    def log_to(self, path: Path) -> None:
        for scorer in self.scorers:
            scorer.log_to(path)

    def record_in(self, path: Path) -> None:
        for scorer in self.scorers:
            scorer.record_in(path)

    def printed(self) -> str:
        return "".join(scorer.printed() for scorer in self.scorers)


class InProcessScorer(Scorer):
    """Call a function that exists only in this process (notebooks, closures). No time limit."""

    def __init__(self, function: Reward, concurrency: int = 1) -> None:
        self.function = function
        self.concurrency = concurrency
        self._ready: tuple[Reward, ReadyReward] | None = None

    def score(self, rows: Sequence[Row], batch: Batch | None = None) -> list[Verdict]:
        return score_across_processes(rows, batch, self._fitting)

    def _fitting(self, rows: Sequence[Row], batch: Batch) -> list[Verdict]:
        found = self._score(rows, batch)
        return [fitting(verdict, row) for verdict, row in zip(found, rows, strict=True)]

    def _score(self, rows: Sequence[Row], batch: Batch) -> list[Verdict]:
        ready = self._made()
        calls = batch.prompts() if ready.by_prompt else [range(i, i + 1) for i in range(len(rows))]
        # Copies: rows of one prompt share what is inside their columns.
        given = [[copy.deepcopy(dict(rows[i])) for i in call] for call in calls]
        if ready.is_async:
            answers = wait_for(_together(ready, given, self.concurrency))
        else:
            answers = [self._answers(ready, call) for call in given]
        return [Verdict.of_answer(answer) for call in answers for answer in call]

    def _made(self) -> ReadyReward:
        if self._ready is None or self._ready[0] is not self.function:
            self._ready = self.function, ReadyReward(self.function)
        return self._ready[1]

    def _answers(self, ready: ReadyReward, rows: Sequence[Row]) -> list[Answer]:
        try:
            return ready.answers(rows)
        except SystemExit as error:
            return [failure(error)] * len(rows)


async def _together(
    ready: ReadyReward, calls: Sequence[Sequence[Row]], concurrency: int
) -> list[list[Answer]]:
    limit = asyncio.Semaphore(concurrency)

    async def one(rows: Sequence[Row]) -> list[Answer]:
        async with limit:
            return await ready.answers_async(rows, None)

    return await asyncio.gather(*map(one, calls))


class EnvironmentScorer(PartScorer):
    """Take the rewards that the environment gave, turn by turn; it has given them already."""

    def __init__(self, part: RewardPart) -> None:
        self.parts = [part]

    def verdicts(self, rows: Sequence[Row], batch: Batch) -> list[list[Verdict]]:
        return [[self._verdict(row)] for row in rows]

    def earned(self, rows: Sequence[Row], batch: Batch | None = None) -> list[Verdict]:
        return self.score(rows, batch)

    def _verdict(self, row: Row) -> Verdict:
        given = row.get("turn_rewards", ())
        if not given:
            return Verdict(None, "the environment failed, so the episode has no reward")
        for turn, reward in enumerate(given, start=1):
            if reward is not None and not abs(reward) <= LARGEST_SCORE:
                return Verdict(None, f"the environment gave {reward} for turn {turn}")
        reward = RowReward(turns=tuple(reward or 0.0 for reward in given))
        return Verdict(reward.total, reward=reward)


def fitting(verdict: Verdict, row: Row) -> Verdict:
    """Return the verdict, or what is wrong where it has numbers for turns or tokens that the row
    does not have."""
    if verdict.reward is None:
        return verdict
    turns, tokens = len(row.get("policy_turns", ())), len(row.get("policy_tokens", ()))
    problem = verdict.reward.problem(turns, tokens)
    return verdict if problem is None else Verdict(None, problem)


def weighted_sum(parts: Sequence[RewardPart], verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a whole row from those of its parts.

    Where a part failed there is no sum, and the part is named. One that abstains is left out of it,
    unless all do.
    """
    others_speak = not all(verdict.abstains for verdict in verdicts)
    terms: list[RowReward] = []
    named: dict[str, float] = {}
    extras: dict[str, Any] = {}
    for part, verdict in zip(parts, verdicts, strict=True):
        prefix = "" if part.name is None else f"{part.name}."
        extras |= {f"{prefix}{name}": value for name, value in verdict.extras.items()}
        if verdict.abstains and others_speak:
            continue
        if verdict.score is None:
            where = "" if part.name is None else f"part {part.name!r}: "
            problem = f"{where}{verdict.problem}"
            return Verdict(None, problem, extras=extras, wrong_type=verdict.wrong_type)
        terms.append(verdict.placed.times(part.weight))
        if part.name is not None:
            named[part.name] = verdict.score
        named |= {f"{prefix}{name}": value for name, value in verdict.parts.items()}
    total = add_rewards(terms)
    if not abs(total.total) <= LARGEST_SCORE:
        return Verdict(None, f"the weighted sum of the parts is {total.total:g}")
    placed = total if total.by_token else None
    return Verdict(total.total, parts=named, extras=extras, reward=placed)
