"""A sampler whose tokens come from an inference engine, one request per row and turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from transformers import PreTrainedModel

from tether.algo.random import uniform
from tether.rollout.local import Row, collate
from tether.rollout.sampler import Draw, Episode, Greedy
from tether.rollout.turns import MultiTurn, answer_all, close_all
from tether.types import Rollout

SEEDS = 2**53  # as many as a float64 in [0, 1) tells apart


@dataclass(frozen=True)
class GenerationRequest:
    """A request to continue these ids."""

    ids: list[int]
    max_tokens: int
    temperature: float  # 0 = always the likeliest token
    seed: int
    stop: tuple[str, ...] = ()  # texts that end a turn; nothing after them is needed


@dataclass(frozen=True)
class Completion:
    """Sampled ids, an EOS that ended them included, and the engine's own log-prob of each."""

    ids: list[int]
    log_probs: list[float]


@runtime_checkable
class Engine(Protocol):
    """An inference engine, such as vLLM or an OpenAI-compatible server."""

    def load(self, weights: PreTrainedModel) -> None:
        """Sample with these weights from now on."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return a completion per request, in order: up to an EOS or `max_tokens`."""
        ...

    def rest(self) -> None:
        """Let go of memory, as nothing is asked until `load` or `generate` is called."""
        ...


class EngineSampler:
    """Sends rounds of requests to an engine until every episode is over.

    An engine knows nothing of turns: it gets all tokens of a row so far and continues up to EOS,
    the limit, or a text that may end a turn. Tokens after the end of a turn are discarded.
    """

    def __init__(
        self,
        engine: Engine,
        eos_ids: frozenset[int],
        max_response_tokens: int,
        temperature: float,
    ) -> None:
        self.engine = engine
        self.eos_ids = eos_ids
        self.max_response_tokens = max_response_tokens
        self.temperature = temperature
        self.float_type = torch.float32
        self.version: int | None = None

    def sync(self, weights: PreTrainedModel, version: int) -> None:
        """Load the weights into the engine, unless it has this version already."""
        if version == self.version:
            return
        first = next(weights.parameters())
        self.float_type = torch.promote_types(first.dtype, torch.float32)
        self.engine.load(weights)
        self.version = version

    def run(
        self,
        episodes: Sequence[Episode],
        choice: Draw | Greedy,
        numbers: Sequence[int] | None = None,
    ) -> Rollout:
        """Run every episode to its end (see `Sampler.run`)."""
        numbers = range(len(episodes)) if numbers is None else numbers
        rows = [Row(n, episode) for n, episode in zip(numbers, episodes, strict=True)]
        live = rows
        while live:
            completions = self.engine.generate(self._requests(live, choice))
            for row, completion in zip(live, completions, strict=True):
                self._take(row, completion)
            over = [row for row in live if row.finish is None]
            answers = answer_all([row.episode for row in over])
            for row, answer in zip(over, answers, strict=True):
                row.add_observation(answer, self.max_response_tokens)
            live = [row for row in over if row.finish is None]
        close_all(episodes)
        self.engine.rest()
        return collate(rows, self.float_type)

    def _requests(self, live: list[Row], choice: Draw | Greedy) -> list[GenerationRequest]:
        """Return a request per row, seeded by the place of its first token in the batch."""
        seeds, temperature = np.zeros(len(live), dtype=np.int64), 0.0
        if isinstance(choice, Draw):
            places = [np.array([row.number for row in live]), np.array([len(r.ids) for r in live])]
            drawn = uniform(choice.seed, choice.purpose, choice.iteration, *places)
            seeds, temperature = (drawn * SEEDS).long().numpy(), self.temperature
        return [
            GenerationRequest(
                ids=[*row.episode.prompt_ids, *row.ids],
                max_tokens=self.max_response_tokens - len(row.ids),
                temperature=temperature,
                seed=int(seed),
                stop=_end_marks(row.episode),
            )
            for row, seed in zip(live, seeds, strict=True)
        ]

    def _take(self, row: Row, completion: Completion) -> None:
        """Append the tokens of a turn; if the engine stopped without an EOS, room ran out."""
        for token, log_prob in zip(completion.ids, completion.log_probs, strict=True):
            row.add_sampled(token, log_prob, self.eos_ids, self.max_response_tokens)
            if row.turn_over or row.finish is not None:
                return
        row.finish = "length"


def _end_marks(episode: Episode) -> tuple[str, ...]:
    return tuple(episode.handler.end_marks) if isinstance(episode, MultiTurn) else ()
