"""What a sampler runs: an episode answers each stop of the policy."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tether.types import Prompts, Rollout


@dataclass(frozen=True)
class Observe:
    """Tokens of the environment that the policy reads next; they are not in its loss."""

    ids: list[int]


@dataclass(frozen=True)
class Done:
    """The episode is over."""


@runtime_checkable
class Episode(Protocol):
    prompt_ids: list[int]

    def take(self, token: int) -> bool:
        """Read one sampled token, in order; True = the policy's turn ends with it."""
        ...

    def answer(self) -> Observe | Done:
        """What follows the turn that just ended. An EOS token ends the episode unasked."""
        ...


@dataclass(frozen=True)
class SingleTurn:
    """A prompt and one response to it."""

    prompt_ids: list[int]

    def take(self, token: int) -> bool:
        return False

    def answer(self) -> Observe | Done:
        return Done()


def single_turns(prompts: Prompts) -> list[SingleTurn]:
    return [SingleTurn(ids) for ids in prompts.ids]


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

    def run(self, episodes: list[Episode], choice: Draw | Greedy) -> Rollout:
        """Every episode to its end; row i of the rollout is episode i."""
        ...
