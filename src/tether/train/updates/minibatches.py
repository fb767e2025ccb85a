"""The walk over an iteration's rows: epochs, minibatches, microbatches."""

from collections.abc import Iterator

from jaxtyping import Int
from torch import Tensor

from tether.algo.random import permutation
from tether.data.collate import microbatches
from tether.types import Experience, Minibatch


def row_slices(
    rows: int, minibatch_rows: int, epochs: int, seed: int, purpose: str, iteration: int
) -> Iterator[Int[Tensor, " some"]]:
    """Row numbers of each optimizer step: slices of a fresh permutation an epoch.

    Every row is used once an epoch; the last slice of an epoch may be smaller.
    """
    for epoch in range(epochs):
        yield from permutation(rows, seed, purpose, iteration, epoch).split(minibatch_rows)


def split_minibatch(
    experience: Experience, rows: Int[Tensor, " some"], max_tokens: int
) -> Iterator[tuple[Int[Tensor, " some"], Minibatch]]:
    """The microbatches of one optimizer step, each with its row numbers in the experience."""
    rows = rows.to(experience.response_mask.device)
    minibatch = experience.minibatch(rows)
    for part in microbatches(minibatch.sequences, max_tokens):
        yield rows[part], minibatch.select(part)
