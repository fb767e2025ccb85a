"""The rows that a file keeps, as tensors: what the trainer's functions take."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.types import Moments
from tether.view.metric_table import as_number
from tether.view.run_reader import Rows

LOGGED = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "new_log_probs",
    "kl",
    "token_level_scores",
    "token_level_rewards",
    "values",
    "advantages",
    "returns",
    "policy_advantages",
)
LISTS = {*LOGGED, "prompt_ids", "response_ids", "response_tokens", "response_mask"}


def length(row: dict[str, Any]) -> int:
    ids = row.get("response_ids")
    return len(ids) if isinstance(ids, list) else 0


def sampled(row: dict[str, Any]) -> list[bool]:
    """True where the policy drew the token; all of them in a file that does not say."""
    mask, size = row.get("response_mask"), length(row)
    if isinstance(mask, list) and len(mask) == size:
        return [cell is True for cell in mask]
    return [True] * size


def is_usable(row: dict[str, Any]) -> bool:
    """Whether the row was trained on; an older file only says whether it was scored."""
    usable = row.get("usable")
    return usable if isinstance(usable, bool) else row.get("score") is not None


def tokens(row: dict[str, Any]) -> list[str]:
    """The text of each token; an older file has only ids."""
    pieces, ids = row.get("response_tokens"), row.get("response_ids")
    if isinstance(pieces, list) and len(pieces) == length(row):
        return [str(piece) for piece in pieces]
    return [f"[{i}]" for i in ids] if isinstance(ids, list) else []


def numbers(row: dict[str, Any], name: str) -> list[float] | None:
    """A logged column, NaN where a cell is no number; None where the file has no such column."""
    column = row.get(name)
    if not isinstance(column, list) or len(column) != length(row):
        return None
    return [as_number(cell) for cell in column]


def summary(number: int, row: dict[str, Any]) -> dict[str, Any]:
    """The line of a row in the table of an iteration."""
    mask = sampled(row)
    return {
        "row": number,
        **{
            name: row.get(name)
            for name in ("data_line", "prompt", "response", "score", "finish_reason")
        },
        "usable": is_usable(row),
        "length": sum(mask),  # as response/length_mean counts: what the policy wrote
        "kl": _sum_of_k1(row, mask),
        "reward": _sum(numbers(row, "token_level_rewards"), mask),
        "advantage": _mean(numbers(row, "advantages"), mask),
    }


def scalars(number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Everything in the row that is not a list a token."""
    plain = {name: value for name, value in row.items() if name not in LISTS}
    return {**plain, "row": number, "usable": is_usable(row)}


def _sum_of_k1(row: dict[str, Any], mask: list[bool]) -> float | None:
    old, ref = numbers(row, "old_log_probs"), numbers(row, "ref_log_probs")
    if old is None or ref is None:
        return None
    return _sum([a - b for a, b in zip(old, ref, strict=True)], mask)


def _sum(column: list[float] | None, mask: list[bool]) -> float | None:
    if column is None:
        return None
    return sum(x for x, counts in zip(column, mask, strict=True) if counts)


def _mean(column: list[float] | None, mask: list[bool]) -> float | None:
    total, count = _sum(column, mask), sum(mask)
    return None if total is None or not count else total / count


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
