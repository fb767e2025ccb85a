"""Several files as one stream of prompts, by weight.

Each file is a stream of its own, its data passes laid end to end; the weights only say whose turn
it is. Turns are dealt evenly, not drawn: with weights 3 and 1 they go A A A B, A A A B, …
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil


def exact(weight: float) -> Fraction:
    """The weight as it was written: 0.1 is a tenth, not the binary fraction next to it."""
    return Fraction(str(weight))


def turn(position: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Whose turn it is at `position` of the stream, and how many turns that file had before.

    Of the first n prompts the first file has the ceiling of n times its share, and the others deal
    the rest among themselves in the same way. So there is nothing to remember, and the counts are
    exact wherever n times every share is whole.
    """
    rest = sum(weights, Fraction(0))
    for file, weight in enumerate(weights):
        share = weight / rest
        before = ceil(position * share)
        if ceil((position + 1) * share) > before:
            return file, before
        position -= before
        rest -= weight
    raise ValueError("no weights")


def earliest(
    count: int, sizes: Sequence[int], weights: Sequence[Fraction]
) -> list[tuple[int, int]]:
    """The first `count` rows without a repetition, as (file, row in it), by weight for as long as
    every file has rows left."""
    due = [
        (row / weight, file, row)
        for file, (size, weight) in enumerate(zip(sizes, weights, strict=True))
        for row in range(min(size, count))
    ]
    return [(file, row) for _, file, row in sorted(due)[:count]]
