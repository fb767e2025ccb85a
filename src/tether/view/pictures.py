"""Histograms of an iteration, and the heat map of a column over rows and tokens.

The size of an answer is bounded, whatever the size of the file: where several cells share one of
the picture, the one farthest from the column's centre is shown, so no outlier is lost.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tether.run.columns import COLUMNS
from tether.view.api import Body, NotFound, rows_of, settings_of
from tether.view.rollout_rows import is_usable, numbers, sampled, summary
from tether.view.run_reader import Rows, Run
from tether.view.settings import samples_per_prompt

BINS = 40
MAX_HEAT_ROWS, MAX_HEAT_TOKENS = 200, 400
ROW_NUMBERS = ("score", "length", "kl")  # one number per row
MAX_LOG_RATIO = 50.0  # a damaged file must not overflow
COMPUTED = {column.name for column in COLUMNS if column.computed}


def read_histograms(run: Run, iteration: int) -> Body:
    """Return the histograms of an iteration: of its rows, and of their tokens."""
    rows = rows_of(run, iteration)
    lines = [summary(number, row) for number, row in rows.by_number.items()]
    made = {name: histogram([line[name] for line in lines]) for name in ROW_NUMBERS}
    cells = token_cells(run, iteration, rows, "advantages").values()
    made["advantages"] = histogram([x for row in cells for x in row])
    made["ratio"] = histogram([x for row in rows.by_number.values() for x in token_ratios(row)])
    shown = {name: x for name, x in made.items() if x is not None}
    return {"iteration": iteration, "histograms": shown, "problems": rows.problems}


def token_ratios(row: dict[str, Any]) -> list[float]:
    """Return exp(new - old) of each token that the policy wrote: GSPO's own is one per response."""
    new, old = numbers(row, "new_log_probs"), numbers(row, "old_log_probs")
    if new is None or old is None or not is_usable(row):
        return []
    pairs = zip(new, old, sampled(row), strict=True)
    return [math.exp(min(a - b, MAX_LOG_RATIO)) for a, b, m in pairs if m and a == a and b == b]


def read_heat(run: Run, iteration: int, name: str) -> Body:
    """Return a column as a picture: a line of cells per row, null where there is no token."""
    if name not in {column.name for column in COLUMNS}:
        raise NotFound(f"There is no column {name[:80]}.")
    rows = rows_of(run, iteration)
    cells = token_cells(run, iteration, rows, name)
    width = max((len(row) for row in cells.values()), default=0)
    table = np.full((len(cells), width), np.nan)
    for at, row in enumerate(cells.values()):
        table[at, : len(row)] = row
    tall, wide = _fold(len(cells), MAX_HEAT_ROWS), _fold(width, MAX_HEAT_TOKENS)
    folded = farthest(table, 1.0 if name == "ratio" else 0.0, tall, wide)
    return {
        "iteration": iteration,
        "column": name,
        "rows": list(cells)[::tall],
        "rows_per_cell": tall,
        "tokens_per_cell": wide,
        "cells": [[None if math.isnan(x) else float(f"{x:.5g}") for x in row] for row in folded],
        "problems": rows.problems,
    }


def token_cells(run: Run, iteration: int, rows: Rows, name: str) -> dict[int, list[float]]:
    """Return a column by row number: NaN for a token that the policy did not write."""
    computed = _computed(run, iteration, rows, name) if name in COMPUTED else {}
    found: dict[int, list[float]] = {}
    for number, row in rows.by_number.items():
        values = computed.get(number) if name in COMPUTED else numbers(row, name)
        if values is not None and is_usable(row):
            mask = sampled(row)
            found[number] = [x if m else math.nan for x, m in zip(values, mask, strict=True)]
    return found


def _computed(run: Run, iteration: int, rows: Rows, name: str) -> dict[int, list[float]]:
    some = next(iter(rows.by_number.values()), None)
    if some is None:
        return {}
    from tether.view.whatif import logged_column  # loads torch

    own = settings_of(run, iteration, some)
    return logged_column(rows, name, own, samples_per_prompt(run.read_config()[1]))


def histogram(values: Sequence[Any], edges: Sequence[float] | None = None) -> Body | None:
    """Return counts in bins of one width from the least to the greatest; None without a number."""
    finite = np.array([x for x in values if type(x) in (int, float) and math.isfinite(x)], float)
    if not len(finite):
        return None
    low, high = float(finite.min()), float(finite.max())
    counts, bounds = np.histogram(finite, bins=_edges(low, high) if edges is None else edges)
    return {
        "counts": counts.tolist(),
        "edges": bounds.tolist(),
        "count": len(finite),
        "mean": float(finite.mean()),
        "std": float(finite.std()),
        "min": low,
        "max": high,
    }


def shared_edges(*lists: Sequence[float]) -> list[float]:
    """Return edges that hold the finite numbers of all lists."""
    finite = [x for values in lists for x in values if math.isfinite(x)]
    return _edges(min(finite, default=0.0), max(finite, default=0.0))


def _edges(low: float, high: float) -> list[float]:
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # all the same: one bin around it
        half = max(abs(low), 1.0) / 2
        return [low - half, low + half]
    return np.linspace(low, high, BINS + 1).tolist()


def _fold(size: int, limit: int) -> int:
    return max(1, math.ceil(size / limit))


def farthest(table: np.ndarray, centre: float, tall: int, wide: int) -> np.ndarray:
    """Fold blocks of tall x wide cells into one: the cell farthest from the centre."""
    if tall == wide == 1 or not table.size:
        return table
    missing = [(0, -size % step) for size, step in zip(table.shape, (tall, wide), strict=True)]
    padded = np.pad(table, missing, constant_values=np.nan)
    height, width = padded.shape[0] // tall, padded.shape[1] // wide
    blocks = padded.reshape(height, tall, width, wide).swapaxes(1, 2).reshape(height, width, -1)
    distance = np.where(np.isnan(blocks), -1.0, np.abs(blocks - centre))
    chosen = distance.argmax(axis=2)[..., None]
    return np.take_along_axis(blocks, chosen, axis=2)[..., 0]
