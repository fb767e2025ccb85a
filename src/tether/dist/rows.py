"""The rows that a process holds, among those of all processes."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TypeVar

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from tether.dist.collectives import all_reduce_sum, gather_replicas
from tether.dist.world import world
from tether.types import ALL_HERE, Rows

T = TypeVar("T")


@dataclass(frozen=True)
class SpreadRows(Rows):
    """Rows of which each process holds some. All methods but `number`, `here`, `own` and `count`
    are called by all processes together."""

    numbers: Int[Tensor, " rows"]  # ascending, on the CPU
    total: int

    def number(self, row: int) -> int:
        return int(self.numbers[row])

    def here(self, numbers: Int[Tensor, " some"]) -> Int[Tensor, " found"]:
        places = torch.full((self.total,), -1)
        places[self.numbers] = torch.arange(len(self.numbers))
        found = places[numbers]
        return found[found >= 0]

    def select(self, rows: Int[Tensor, " some"]) -> "SpreadRows":
        own = self.numbers[rows].sort().values
        kept = torch.cat(gather_replicas(own)).sort().values
        return SpreadRows(torch.searchsorted(kept, own), len(kept))

    def sum(self, x: Tensor) -> Tensor:
        return all_reduce_sum(x)

    def everyone(self, x: Shaped[Tensor, "rows ..."]) -> Shaped[Tensor, "all ..."]:
        parts = gather_replicas((self.numbers, x))
        order = torch.cat([numbers for numbers, _ in parts]).argsort()
        return torch.cat([values for _, values in parts])[order].to(x.device)

    def own(self, x: Shaped[Tensor, "all ..."]) -> Shaped[Tensor, "rows ..."]:
        return x[self.numbers.to(x.device)]

    def gather(self, items: Sequence[T]) -> list[T]:
        parts = gather_replicas((self.numbers.tolist(), list(items)))
        numbered = chain.from_iterable(zip(*part, strict=True) for part in parts)
        return [item for _, item in sorted(numbered, key=lambda pair: pair[0])]

    def together(self, items: Sequence[T]) -> list[T]:
        return [*chain.from_iterable(gather_replicas(list(items)))]

    def count(self, x: Sized) -> int:
        return self.total


def spread(rows: int) -> Rows:
    """Return this process's share of as many rows: a block, so that neighbours stay together."""
    here = world()
    if here.replicas == 1:
        return ALL_HERE
    return SpreadRows(torch.tensor(block(rows, here.replica, here.replicas)), rows)


def block(rows: int, share: int, shares: int) -> range:
    """Return the rows of one of several shares, which differ by one row at most."""
    return range(rows * share // shares, rows * (share + 1) // shares)


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """Return the rows of batches that are put one after the other."""
    spread_parts = [part for part in parts if isinstance(part, SpreadRows)]
    if not spread_parts:
        return ALL_HERE
    starts = [0, *accumulate(part.total for part in spread_parts)]
    numbers = [s + part.numbers for s, part in zip(starts, spread_parts, strict=False)]
    return SpreadRows(torch.cat(numbers), starts[-1])


def of_rows(rows: Rows, items: Sequence[T]) -> list[T]:
    """Return those of an item for each of all rows that are of the rows here."""
    return [items[n] for n in rows.numbers.tolist()] if isinstance(rows, SpreadRows) else [*items]
