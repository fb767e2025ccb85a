"""What a sampler runs: an episode reads the policy's tokens and answers each of its turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from tether.data.batching import concat_rollouts, own_rows
from tether.dist.collectives import gather_results
from tether.dist.fsdp import unsharded_model
from tether.types import Call, Prompts, Rollout


@dataclass(frozen=True)
class Observe:
    """Tokens of the environment that the policy reads next; they are not in its loss."""

    ids: list[int]


@dataclass(frozen=True)
class Done:
    """The episode is over."""


@runtime_checkable
class Episode(Protocol):
    """One prompt and all that follows it. EOS always ends it, without a question to `answer`."""

    prompt_ids: list[int]

    def add_token(self, token: int) -> bool:
        """Read one sampled token, in order; True = the policy's turn ends with it."""
        ...

    def answer(self) -> Observe | Done:
        """What follows the turn that just ended. May call a tool."""
        ...


@dataclass(frozen=True)
class SingleTurn:
    """A prompt and one response to it, up to EOS."""

    prompt_ids: list[int]

    def add_token(self, token: int) -> bool:
        return False

    def answer(self) -> Observe | Done:
        return Done()


Episodes = Callable[[Prompts], Sequence[Episode]]  # fresh ones, an episode a prompt


def single_turns(prompts: Prompts) -> list[SingleTurn]:
    return [SingleTurn(ids) for ids in prompts.ids]


def tool_calls_of(episodes: Sequence[Episode]) -> tuple[tuple[Call, ...], ...]:
    """What each episode asked of its tools, for the rollout; nothing where none has any."""
    calls = tuple(tuple(getattr(episode, "calls", ())) for episode in episodes)
    return calls if any(calls) else ()


@dataclass(frozen=True)
class Draw:
    """How tokens are chosen: sampled with numbers computed from this key."""

    seed: int
    purpose: str
    iteration: int


@dataclass(frozen=True)
class Greedy:
    """The likeliest token, always."""


@runtime_checkable
class Sampler(Protocol):
    def sync(self, weights: object, version: int) -> None:
        """Take the policy's weights as of this iteration."""
        ...

    def run(
        self,
        episodes: Sequence[Episode],
        choice: Draw | Greedy,
        numbers: Sequence[int] | None = None,
    ) -> Rollout:
        """Every episode to its end; row i of the rollout is episode i. Draws are keyed by
        `numbers`, its place among the rows of all processes (default: i)."""
        ...


class DistributedSampler:
    """Every process gets the whole rollout, in row order, as if one had sampled it."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def sync(self, weights: nn.Module, version: int) -> None:
        """No sampler knows of weights that lie in parts: it is given whole ones."""
        self.sampler.sync(unsharded_model(weights), version)

    def run(
        self,
        episodes: Sequence[Episode],
        choice: Draw | Greedy,
        numbers: Sequence[int] | None = None,
    ) -> Rollout:
        numbers = range(len(episodes)) if numbers is None else numbers
        mine = own_rows(len(episodes))
        own, keys = episodes[mine.start : mine.stop], numbers[mine.start : mine.stop]
        parts = gather_results(lambda: self.sampler.run(own, choice, keys) if own else None)
        return concat_rollouts([part for part in parts if part is not None])
