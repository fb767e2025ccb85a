"""The sampler of a training process whose rows are sampled elsewhere, by a `SamplerPool`."""

import itertools
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from tether.rollout.chunks import Chunk, cut_chunks
from tether.rollout.pool import Handout, SamplerPool, Tally, Weights
from tether.rollout.sampler import Draw, Episode, Greedy
from tether.types import Rollout

SentWeights = Callable[[PreTrainedModel], Mapping[str, Tensor]]


class SamplersApart:
    """A `Sampler` that hands its rows out in chunks. Of an episode only the prompt is used: those
    who sample make their own from it, and call its tools."""

    def __init__(
        self,
        pool: SamplerPool,
        sent: SentWeights,
        max_response_tokens: int,
        chunk_tokens: int | None,
    ) -> None:
        self.pool, self.sent = pool, sent
        self.max_response_tokens, self.chunk_tokens = max_response_tokens, chunk_tokens
        self.serials = itertools.count()
        self.mark: tuple[int, int] | None = None

    def sync(self, weights: PreTrainedModel, version: int) -> None:
        """Use a copy of these weights from now on; the same ones are sent only once."""
        moves = sum(weight._version for weight in weights.parameters())
        if (version, moves) != self.mark:
            self.mark = version, moves
            self.weights = Weights(next(self.serials), version, self.sent(weights))

    def begin(
        self,
        episodes: Sequence[Episode],
        choice: Draw | Greedy,
        numbers: Sequence[int] | None = None,
    ) -> Handout:
        """Begin to run every episode (see `SamplerApart`)."""
        numbers = range(len(episodes)) if numbers is None else numbers
        prompts = [episode.prompt_ids for episode in episodes]
        cut = cut_chunks([*map(len, prompts)], self.max_response_tokens, self.chunk_tokens)
        chunks = [
            Chunk(rows.start, [prompts[i] for i in rows], [numbers[i] for i in rows], choice)
            for rows in cut
        ]
        return self.pool.begin(self.weights, chunks)

    def run(
        self,
        episodes: Sequence[Episode],
        choice: Draw | Greedy,
        numbers: Sequence[int] | None = None,
    ) -> Rollout:
        """Run every episode to its end (see `Sampler.run`)."""
        return self.begin(episodes, choice, numbers).result()

    def take_tally(self) -> Tally:
        """Return what the samplers did since the last call."""
        return self.pool.take_tally()

    def close(self) -> None:
        """End all samplers."""
        self.pool.close()
