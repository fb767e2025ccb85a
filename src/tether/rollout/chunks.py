"""Chunks of a batch's rows that are decoded apart from each other, whoever decodes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from tether.data.batching import concat_rollouts
from tether.rollout.sampler import Draw, Episode, Greedy, Sampler
from tether.types import Rollout


@dataclass(frozen=True)
class Chunk:
    """Neighbouring rows, with all that a sampler elsewhere needs but the weights."""

    first: int  # of the batch's rows
    prompt_ids: list[list[int]]
    numbers: list[int]  # which random numbers are computed from
    choice: Draw | Greedy

    def __len__(self) -> int:
        return len(self.prompt_ids)


def cut_chunks(prompt_lengths: Sequence[int], most_new: int, budget: int | None) -> list[range]:
    """Cut rows into neighbours of at most `budget` tokens, each row with all that it may grow to.

    A row beyond the budget is a chunk of its own. Nothing but token counts decides: rows that are
    decoded together give the same bits, whoever does it and how often.
    """
    if budget is None:
        return [range(len(prompt_lengths))]
    chunks: list[range] = []
    begin = tokens = 0
    for row, length in enumerate(prompt_lengths):
        if row > begin and tokens + length + most_new > budget:
            chunks.append(range(begin, row))
            begin, tokens = row, 0
        tokens += length + most_new
    return [*chunks, range(begin, len(prompt_lengths))]


class ChunkedSampler:
    """Samples chunk by chunk, as samplers apart do: `rollout.chunk_tokens`."""

    def __init__(self, sampler: Sampler, max_response_tokens: int, budget: int) -> None:
        self.sampler, self.max_response_tokens, self.budget = sampler, max_response_tokens, budget

    def sync(self, weights: PreTrainedModel, version: int) -> None:
        self.sampler.sync(weights, version)

    def run(
        self,
        episodes: Sequence[Episode],
        choice: Draw | Greedy,
        numbers: Sequence[int] | None = None,
    ) -> Rollout:
        """Run every episode to its end (see `Sampler.run`)."""
        numbers = range(len(episodes)) if numbers is None else numbers
        lengths = [len(episode.prompt_ids) for episode in episodes]
        return concat_rollouts(
            [
                self.sampler.run([episodes[i] for i in rows], choice, [numbers[i] for i in rows])
                for rows in cut_chunks(lengths, self.max_response_tokens, self.budget)
            ]
        )
