"""Numbers by iteration, as columns: what the curves are drawn from."""

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

MAX_POINTS = 2000


class Table:
    """The lines of metrics.jsonl or timings.jsonl. What is missing or not a number is NaN."""

    def __init__(self) -> None:
        self.iterations: list[int] = []
        self.columns: dict[str, array[float]] = {}
        self.row_of: dict[int, int] = {}
        self._names: tuple[str, ...] = ()  # of the last record: the next one mostly has the same
        self._targets: list[array[float] | None] = []

    def __len__(self) -> int:
        return len(self.iterations)

    def add(self, record: dict[str, Any]) -> None:
        """Append a record; one without an iteration has no place on any axis and is left out."""
        iteration = record.get("iteration")
        if type(iteration) is not int:
            return
        names = tuple(record)
        if names != self._names:
            self._names, self._targets = names, [self._column(name) for name in names]
        for column, value in zip(self._targets, record.values(), strict=True):
            if column is not None:
                column.append(value if type(value) is float else as_number(value))
        self.row_of[iteration] = len(self.iterations)
        self.iterations.append(iteration)

    def _column(self, name: str) -> "array[float] | None":
        """Return the column of that name, filled up to the next row."""
        if name in ("schema", "iteration"):
            return None
        column = self.columns.setdefault(name, array("d"))
        column.extend([math.nan] * (len(self.iterations) - len(column)))
        return column

    def at(self, name: str, row: int | None) -> float:
        column = self.columns.get(name)
        if column is None or row is None or row >= len(column):
            return math.nan
        return column[row]


def as_number(value: Any) -> float:
    """Return a finite number as a float, and NaN for text, true, null and overflow."""
    if type(value) is float:
        return value if math.isfinite(value) else math.nan
    try:
        return float(value) if type(value) is int else math.nan
    except OverflowError:
        return math.nan


def thin(columns: Iterable[Sequence[float]], rows: int) -> list[int]:
    """Choose at most about MAX_POINTS of `rows`: evenly spaced ones, and where a column peaks.

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
