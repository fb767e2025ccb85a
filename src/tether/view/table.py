"""Numbers by iteration, as columns: what the curves are drawn from."""

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

MAX_POINTS = 2000


class Table:
    """One row a line of metrics.jsonl or timings.jsonl. What is missing or no number is NaN."""

    def __init__(self) -> None:
        self.iterations: list[int] = []
        self.columns: dict[str, array[float]] = {}
        self.row_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.iterations)

    def add(self, record: dict[str, Any]) -> None:
        """A record without an iteration has no place on any axis and is left out."""
        iteration = record.get("iteration")
        if type(iteration) is not int:
            return
        row = len(self.iterations)
        for name, value in record.items():
            if name in ("schema", "iteration"):
                continue
            column = self.columns.setdefault(name, array("d"))
            if len(column) < row:
                column.extend([math.nan] * (row - len(column)))
            column.append(as_number(value))
        self.row_of[iteration] = row
        self.iterations.append(iteration)

    def at(self, name: str, row: int | None) -> float:
        column = self.columns.get(name)
        if column is None or row is None or row >= len(column):
            return math.nan
        return column[row]


def as_number(value: Any) -> float:
    """NaN for what is no finite number: text, true, null, or beyond every float."""
    if type(value) is float:
        return value if math.isfinite(value) else math.nan
    try:
        return float(value) if type(value) is int else math.nan
    except OverflowError:
        return math.nan


def thin(columns: Iterable[Sequence[float]], rows: int) -> list[int]:
    """At most about MAX_POINTS of `rows`: evenly spaced ones, and where a column peaks.

    Half of the points are spaced evenly; the others are the lowest and the highest of each column
    in windows as fine as they allow, so no spike is lost.
    """
    if rows <= MAX_POINTS:
        return list(range(rows))
    columns = list(columns)
    chosen = {rows - 1, *range(0, rows, math.ceil(rows / (MAX_POINTS // 2)))}
    windows = max(1, MAX_POINTS // 2 // (2 * max(1, len(columns))))
    size = math.ceil(rows / windows)
    for column in columns:
        for start in range(0, rows, size):
            window = [i for i in range(start, min(start + size, rows)) if column[i] == column[i]]
            if window:
                chosen.add(min(window, key=column.__getitem__))
                chosen.add(max(window, key=column.__getitem__))
    return sorted(chosen)
