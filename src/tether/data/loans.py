"""Rows on loan: for a pass each process computes about as many tokens as any other, whoever holds
the rows. They are lent to it, and what it finds comes back.

    loan = lend(sequences, max_tokens)
    borrowed = loan.out(sequences)
    for part in loan.microbatches: ... borrowed.select(part.rows)
    (found,) = loan.back((of_borrowed,), width)
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tether.data.batching import Microbatch, concat_rows, shared_microbatches
from tether.data.shared_prompts import number_prompts
from tether.dist.collectives import exchange_replicas, gather_replicas
from tether.dist.world import world
from tether.support.transfer import to_device
from tether.types import Sequences


@dataclass(frozen=True)
class MaskedRows:
    """Rows, and which of their response tokens a pass is to read."""

    sequences: Sequences
    mask: Bool[Tensor, "rows response"]  # on the CPU

    def select(self, rows: Int[Tensor, " some"]) -> "MaskedRows":
        """Select rows, and cut them to the longest of them."""
        sequences = self.sequences.select(rows)
        return MaskedRows(sequences, self.mask[rows, : sequences.width])


@runtime_checkable
class Selectable(Protocol):
    """Rows that can be selected by number."""

    def select(self, rows: Int[Tensor, " some"]) -> Any:
        """Return these rows."""
        ...


S = TypeVar("S", bound=Selectable)
Numbers = list[Int[Tensor, " some"]]


@dataclass(frozen=True)
class Loan:
    """What one process lends to each and borrows from each. What is found of rows comes back, but
    not of those that were borrowed to be idle with."""

    rows: int  # of this process
    microbatches: list[Microbatch]  # by places among the borrowed rows
    lent: Numbers  # to each process, by places among one's own rows
    back_here: Numbers  # of these what comes back
    back_there: Numbers  # what goes back to each process, by places among the borrowed rows

    def out(self, own: S) -> S:
        """Return the borrowed rows in place of one's own."""
        if world().replicas == 1:
            return own
        found = exchange_replicas([own.select(rows) if len(rows) else None for rows in self.lent])
        return concat_rows([_placed_like(own, part) for part in found if part is not None])

    def back(self, found: Sequence[Tensor], width: int) -> tuple[Tensor, ...]:
        """Return results of the borrowed rows for one's own; those of several columns get `width`
        of them, padded with 0."""
        if world().replicas == 1:
            return tuple(_fitted(x, width) for x in found)
        given = [[x[to_device(rows, x.device)] for x in found] for rows in self.back_there]
        returned = exchange_replicas(given)
        blank = [blank_rows(self.rows, width, x) for x in found]
        for rows, part in zip(self.back_here, returned, strict=True):
            for whole, x in zip(blank, part, strict=True):
                place = to_device(rows, whole.device)
                whole[place] = _fitted(to_device(x, whole.device), width)
        return tuple(blank)


def lend(sequences: Sequences, max_tokens: int, max_cells: int | None = None) -> Loan:
    """Plan who computes which of the rows that the processes hold, in which microbatches."""
    numbers = sequences.prompt_numbers
    if sequences.share_prompts and numbers is None:
        numbers = number_prompts(sequences)
    everyone = gather_replicas((sequences.prompt_lengths, sequences.response_lengths, numbers))
    holders = torch.tensor([who for who, part in enumerate(everyone) for _ in part[0]])
    places = torch.cat([torch.arange(len(part[0])) for part in everyone])
    if not len(places):
        nothing = [places] * len(everyone)
        return Loan(0, [], nothing, nothing, nothing)
    prompts, responses, prompt_numbers = zip(*everyone, strict=True)
    outline = Sequences(
        ids=torch.zeros(len(places), 0, dtype=torch.long),
        prompt_lengths=torch.cat(prompts),
        response_lengths=torch.cat(responses),
        share_prompts=sequences.share_prompts,
        prompt_numbers=None if numbers is None else torch.cat(prompt_numbers),
    )
    shares = shared_microbatches(outline, max_tokens, max_cells)
    here, replicas = world().replica, range(len(everyone))
    borrowed = [_rows_of(parts) for parts in shares]
    counted = [_rows_of([part for part in parts if not part.idle]) for parts in shares]
    own = borrowed[here]
    at = torch.zeros(len(places), dtype=torch.long)
    at[own] = torch.arange(len(own))
    return Loan(
        rows=len(sequences.prompt_lengths),
        microbatches=[replace(part, rows=at[part.rows]) for part in shares[here]],
        lent=[places[rows[holders[rows] == here]] for rows in borrowed],
        back_here=[places[rows[holders[rows] == here]] for rows in counted],
        back_there=[at[counted[here][holders[counted[here]] == who]] for who in replicas],
    )


def _rows_of(parts: Sequence[Microbatch]) -> Int[Tensor, " some"]:
    """Return the rows of these microbatches, ascending: so those of one holder are neighbours."""
    if not parts:
        return torch.zeros(0, dtype=torch.long)
    return torch.cat([part.rows for part in parts]).unique()


def _placed_like(own: Any, found: Any) -> Any:
    """Put each tensor of what was borrowed on the device of its like."""
    changed: dict[str, Any] = {}
    for field in fields(own):
        like, value = getattr(own, field.name), getattr(found, field.name)
        if isinstance(like, Tensor):
            changed[field.name] = to_device(value, like.device)
        elif is_dataclass(like):
            changed[field.name] = _placed_like(like, value)
    return replace(found, **changed)


def blank_rows(rows: int, width: int, like: Tensor) -> Tensor:
    """Return zeros for results like these: of each row a number, or `width` columns."""
    return like.new_zeros((rows, width, *like.shape[2:])[: like.ndim])


def _fitted(x: Tensor, width: int) -> Tensor:
    """Cut or pad the columns to `width`."""
    if x.ndim == 1 or x.shape[1] == width:
        return x
    fitted = blank_rows(len(x), width, x)
    fitted[:, : x.shape[1]] = x[:, :width]
    return fitted
