"""A pass over all rows without gradients: each process reads its own, and all get the whole."""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from tether.data.collate import own_microbatches
from tether.dist.reduce import total
from tether.dist.shard import let_go
from tether.types import Sequences

Read = Callable[[Sequences, Int[Tensor, " some"]], tuple[Tensor, ...]]


@torch.no_grad()
def read_all(sequences: Sequences, width: int, max_tokens: int, read: Read) -> tuple[Tensor, ...]:
    """What `read` finds of each microbatch and its row numbers, a number a row or a number a
    response token, in the order of all rows and `width` columns."""
    whole: tuple[Tensor, ...] | None = None
    try:
        for part in own_microbatches(sequences, max_tokens):
            found = read(sequences.select(part.rows), part.rows)
            if whole is None:
                whole = tuple(_blank(len(sequences.ids), width, piece) for piece in found)
            if part.idle:
                continue
            for all_rows, piece in zip(whole, found, strict=True):
                place = (part.rows,) if piece.ndim == 1 else (part.rows, slice(piece.shape[1]))
                all_rows[place] = piece
    finally:
        let_go()
    return tuple(total(all_rows) for all_rows in whole)  # whoever has not read a row adds 0


def _blank(rows: int, width: int, piece: Tensor) -> Tensor:
    return piece.new_zeros((rows, width)[: piece.ndim])
