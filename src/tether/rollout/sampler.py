"""Samplers and episodes: an episode takes the policy's tokens and answers each of its turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
from transformers import PreTrainedModel

from tether.data.batching import concat_rollouts, no_rows
from tether.dist.collectives import all_or_error, gather_sharing
from tether.dist.fsdp import unsharded_model
from tether.dist.rows import block
from tether.dist.world import world
from tether.rollout.token_choice import Draw, Greedy
from tether.types import Call, EnvironmentState, FinishReason, Prompts, Rollout


@dataclass(frozen=True)
class Observe:
    """Tokens of the environment that the policy sees next.

    They are not in its loss: `response_mask` is False there (Search-R1, arXiv 2503.09516).
    """

    ids: list[int]


@dataclass(frozen=True)
class Done:
    """The episode is over: by itself, or cut off by its environment."""

    reason: FinishReason = "stop"


@runtime_checkable
class Episode(Protocol):
    """A prompt and all that follows it. EOS ends it, without a call of `answer`, unless the turns
    of the episode end with EOS (`continues_after_eos` True)."""

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's ids."""
        ...

    def add_token(self, token: int) -> bool:
        """Take the next sampled token; return whether the policy's turn ends with it."""
        ...

    def answer(self) -> Observe | Done:
        """Return what follows the turn that just ended; this may call a tool."""
        ...


@dataclass(frozen=True)
class SingleTurn:
    """A prompt and one response to it, up to EOS."""

    prompt_ids: list[int]

    def add_token(self, token: int) -> bool:
        """Return False: only EOS ends the turn."""
        return False

    def answer(self) -> Observe | Done:
        """Return the end of the episode."""
        return Done()


Episodes = Callable[[Prompts], Sequence[Episode]]  # fresh ones, one per prompt


def single_turns(prompts: Prompts) -> list[SingleTurn]:
    """Return an episode of a single turn per prompt."""
    return [SingleTurn(ids) for ids in prompts.ids]


def tool_calls_of(episodes: Sequence[Episode]) -> tuple[tuple[Call, ...], ...]:
    """Return the tool calls of each episode; an empty tuple if there are none at all."""
    calls = tuple(tuple(getattr(episode, "calls", ())) for episode in episodes)
    return calls if any(calls) else ()


def turn_rewards_of(episodes: Sequence[Episode]) -> tuple[tuple[float | None, ...], ...]:
    """Return the rewards of each episode's turns; an empty tuple if there are none at all."""
    rewards = tuple(tuple(getattr(episode, "turn_rewards", ())) for episode in episodes)
    return rewards if any(rewards) else ()


def states_of(episodes: Sequence[Episode]) -> tuple[EnvironmentState | None, ...]:
    """Return what rewards may see of each episode's environment; () if there is nothing at all."""
    states = tuple(getattr(episode, "state", None) for episode in episodes)
    return states if any(states) else ()


@runtime_checkable
class Sampler(Protocol):
    """Runs episodes with the policy's weights."""

    def sync(self, weights: PreTrainedModel, version: int) -> None:
        """Use these weights from now on; `version` is their iteration."""
        ...

    def run(
        self,
        episodes: Sequence[Episode],
        choice: Draw | Greedy,
        numbers: Sequence[int] | None = None,
    ) -> Rollout:
        """Run every episode to its end; row i of the rollout, which is on the CPU, is episode i.

        `numbers` are the rows' places among the rows of all processes (default: i). Random
        numbers are computed from them.
        """
        ...


@runtime_checkable
class Sampling(Protocol):
    """Rows that are being sampled."""

    def result(self) -> Rollout:
        """Wait for the rows."""
        ...


@dataclass(frozen=True)
class Sampled:
    """Rows that were sampled at once."""

    rollout: Rollout

    def result(self) -> Rollout:
        return self.rollout


@runtime_checkable
class SamplerApart(Sampler, Protocol):
    """A sampler that works beside its caller."""

    def begin(
        self,
        episodes: Sequence[Episode],
        choice: Draw | Greedy,
        numbers: Sequence[int] | None = None,
    ) -> Sampling:
        """Begin to run every episode, with the weights of the last `sync`."""
        ...


def begin(
    sampler: Sampler,
    episodes: Sequence[Episode],
    choice: Draw | Greedy,
    numbers: Sequence[int] | None = None,
) -> Sampling:
    """Begin to run every episode; a sampler that does not work beside its caller ends it first."""
    if isinstance(sampler, SamplerApart):
        return sampler.begin(episodes, choice, numbers)
    return Sampled(sampler.run(episodes, choice, numbers))


class DistributedSampler:
    """Samples this process's rows. Of processes that share layers, which have the same rows, each
    samples some."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def sync(self, weights: PreTrainedModel, version: int) -> None:
        """Pass on the weights; sharded ones are gathered first."""
        plain = cast(PreTrainedModel, unsharded_model(weights))
        self.device = plain.device
        self.float_type = torch.promote_types(plain.dtype, torch.float32)
        self.sampler.sync(plain, version)

    def run(
        self,
        episodes: Sequence[Episode],
        choice: Draw | Greedy,
        numbers: Sequence[int] | None = None,
    ) -> Rollout:
        """Run the episodes. The rollout goes to the device of the weights."""
        numbers = range(len(episodes)) if numbers is None else numbers
        here = world()
        mine = block(len(episodes), here.rank % here.sharing, here.sharing)
        own, keys = episodes[mine.start : mine.stop], numbers[mine.start : mine.stop]

        def sample() -> Rollout:
            return self.sampler.run(own, choice, keys) if own else no_rows(self.float_type)

        return concat_rollouts(gather_sharing(all_or_error(sample))).to(self.device)

    def begin(
        self,
        episodes: Sequence[Episode],
        choice: Draw | Greedy,
        numbers: Sequence[int] | None = None,
    ) -> Sampling:
        """Begin to run the episodes, where the sampler works beside this process."""
        if not isinstance(self.sampler, SamplerApart):
            return Sampled(self.run(episodes, choice, numbers))
        return _Moved(self.sampler.begin(episodes, choice, numbers), self.device)


@dataclass(frozen=True)
class _Moved:
    """Rows that are being sampled, and will go to a device."""

    sampling: Sampling
    device: torch.device

    def result(self) -> Rollout:
        return self.sampling.result().to(self.device)
