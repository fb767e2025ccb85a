"""What is told, before it is drawn: the terminal and the page render the same sections."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text, the first one the heading; columns from `numbers_from` on stand right."""

    rows: list[list[str]]
    numbers_from: int = 1


@dataclass(frozen=True)
class Section:
    title: str
    blocks: list[str | Table]  # paragraphs and tables, in order


def number(x: float | None) -> str:
    """Four decimals where they tell something, else the size; nothing for no number."""
    if x is None:
        return "–"
    if x == 0 or not math.isfinite(x):
        return f"{x:g}".removeprefix("-") if x == 0 else f"{x:g}"
    return f"{x:.4f}" if 1e-3 <= abs(x) < 1e5 else f"{x:.1e}"
