"""The rows that a file keeps, as tensors: what the trainer's functions take."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.types import Moments
from tether.view.rows import LOGGED, is_usable, length, numbers, sampled
from tether.view.source import Rows
from tether.view.table import as_number

NEEDED = tuple(name for name in LOGGED if name != "rollout_log_probs")


@dataclass(frozen=True)
class Kept:
    """The rows of one file as tensors, group by group; a row that is not there counts nowhere."""

    slot_of: dict[int, int]  # row number -> row of the tensors
    complete_groups: frozenset[int]
    lengths: dict[int, int]
    mask: Bool[Tensor, "rows response"]
    logged: dict[str, Float[Tensor, "rows response"]]
    scores: Float[Tensor, " rows"]
    greedy_scores: Float[Tensor, " rows"]
    final_values: Float[Tensor, " rows"]
    moments: Moments


@lru_cache(maxsize=2)
def read_kept(rows: Rows, samples: int) -> Kept:
    """Tensors of the rows that are whole. Their width changes no number."""
    whole = {n: row for n, row in rows.by_number.items() if n >= 0 and _is_whole(row)}
    groups = sorted({number // samples for number in whole})
    slots = [group * samples + offset for group in groups for offset in range(samples)]
    slot_of = {number: slot for slot, number in enumerate(slots) if number in whole}
    width = max((length(row) for row in whole.values()), default=1) or 1
    present = [whole.get(number) for number in slots]

    def cells(name: str) -> Tensor:
        return _padded([numbers(row, name) if row else [] for row in present], width)

    def scalar(name: str) -> Tensor:
        return torch.tensor([_known(row, name) for row in present], dtype=torch.float32)

    mask = [sampled(row) if row and is_usable(row) else [] for row in present]
    whitening = next(iter(whole.values()), {}).get("whitening", {})
    return Kept(
        slot_of=slot_of,
        complete_groups=frozenset(
            g for g in groups if all(g * samples + i in slot_of for i in range(samples))
        ),
        lengths={number: length(row) for number, row in whole.items()},
        mask=_padded(mask, width).bool(),
        logged={name: cells(name) for name in NEEDED},
        scores=scalar("score"),
        greedy_scores=scalar("greedy_score"),
        final_values=scalar("final_value"),
        moments=Moments(
            mean=torch.tensor(_known(whitening, "mean"), dtype=torch.float32),
            variance=torch.tensor(_known(whitening, "variance"), dtype=torch.float32),
            count=torch.tensor(int(_known(whitening, "count"))),
        ),
    )


def _is_whole(row: dict[str, Any]) -> bool:
    columns = all(numbers(row, name) is not None for name in NEEDED)
    return columns and length(row) > 0 and isinstance(row.get("whitening"), dict)


def _known(mapping: dict[str, Any] | None, name: str) -> float:
    """A number of a row; 0 where there is none, as an unscored row trains with 0."""
    value = as_number((mapping or {}).get(name))
    return value if value == value else 0.0


def _padded(rows: Sequence[Sequence[float]], width: int) -> Float[Tensor, "rows width"]:
    padded = [[*row, *[0.0] * (width - len(row))] for row in rows] or [[0.0] * width]
    return torch.tensor(padded, dtype=torch.float32)
