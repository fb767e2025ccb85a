"""Read the rows of a rollout file, some of which another version wrote. Imports no torch."""

from typing import Any

from tether.run.columns import COLUMNS, WRITTEN, Column
from tether.view.metric_table import as_number

LISTS = {
    *(column.name for column in COLUMNS),
    "prompt_ids",
    "response_ids",
    "response_tokens",
    "response_mask",
}
FOR_WHAT_IF = tuple(column for column in WRITTEN if column.for_what_if)


def length(row: dict[str, Any]) -> int:
    ids = row.get("response_ids")
    return len(ids) if isinstance(ids, list) else 0


def sampled(row: dict[str, Any]) -> list[bool]:
    """Return True where the policy drew the token: everywhere, if the file does not say."""
    mask, size = row.get("response_mask"), length(row)
    if isinstance(mask, list) and len(mask) == size:
        return [cell is True for cell in mask]
    return [True] * size


def is_usable(row: dict[str, Any]) -> bool:
    """Return whether the row was trained on; an older file only says whether it was scored."""
    usable = row.get("usable")
    return usable if isinstance(usable, bool) else row.get("score") is not None


def tokens(row: dict[str, Any]) -> list[str]:
    """Return the text of each token; an older file has only ids."""
    pieces, ids = row.get("response_tokens"), row.get("response_ids")
    if isinstance(pieces, list) and len(pieces) == length(row):
        return [str(piece) for piece in pieces]
    return [f"[{i}]" for i in ids] if isinstance(ids, list) else []


def numbers(row: dict[str, Any], name: str) -> list[float] | None:
    """Return a column, NaN where a cell is not a number; None where the row has no such column."""
    column = row.get(name)
    if not isinstance(column, list) or len(column) != length(row):
        return None
    return [as_number(cell) for cell in column]


def summary(number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a row in the table of an iteration."""
    mask = sampled(row)
    return {
        "row": number,
        **{
            name: row.get(name)
            for name in ("data_file", "data_line", "prompt", "response", "score", "finish_reason")
        },
        **{name: mapping(row, name) for name in ("columns", "score_parts")},
        "usable": is_usable(row),
        "length": sum(mask),  # as response/length_mean counts: what the policy wrote
        "kl": _sum_of_k1(row, mask),
        "reward": _sum(numbers(row, "token_level_rewards"), mask),
        "advantage": _mean(numbers(row, "advantages"), mask),
    }


def mapping(row: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a mapping inside the row; empty where an older file has none."""
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def scalars(number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Return everything in the row that is not a per-token list."""
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


def has_what_if(row: dict[str, Any]) -> bool:
    """Return whether the row holds every column that what-if cannot do without."""
    complete = all(cells(row, column) is not None for column in FOR_WHAT_IF)
    return complete and length(row) > 0 and isinstance(row.get("whitening"), dict)


def cells(row: dict[str, Any], column: Column) -> list[float] | None:
    """Return a column's cells, or what its absence means."""
    if column.name not in row and column.if_absent is not None:
        return [column.if_absent] * length(row)
    return numbers(row, column.name)
