"""Tables as HTML, for objects that a notebook shows. Every text is escaped; there is no script."""

import math
from collections.abc import Sequence
from html import escape

POSITIVE, NEGATIVE = "36, 88, 179", "200, 80, 30"  # blue and orange, told apart by most eyes
STRONGEST = 0.55  # opacity: the text on it stays readable on a light and on a dark page
CELL = "padding:.15em .7em;white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate"
LONGEST = 400  # characters of a cell


def number(x: float | None) -> str:
    """Format with four significant digits; None is –."""
    if x is None:
        return "–"
    return f"{x:.4g}"


def visible(text: str) -> str:
    """Return a text on one line: line breaks and direction marks are made visible."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def paragraph(text: str) -> str:
    return f'<p style="unicode-bidi:isolate;overflow-wrap:anywhere">{escape(_short(text))}</p>'


def table(
    rows: Sequence[Sequence[str]],
    numbers_from: int = 1,
    tints: Sequence[Sequence[float]] | None = None,
) -> str:
    """Return a table whose first row is the heading; columns from `numbers_from` on align right.

    `tints` has a number from -1 to 1 for each cell below the heading: its colour, 0 = none.
    """
    heading, *body = rows
    lines = [_row("th", heading, numbers_from, None)]
    for position, cells in enumerate(body):
        lines.append(_row("td", cells, numbers_from, tints[position] if tints else None))
    style = "border-collapse:collapse;font-variant-numeric:tabular-nums"
    return f'<div style="overflow-x:auto"><table style="{style}">{"".join(lines)}</table></div>'


def tints(column: Sequence[float | None]) -> list[float]:
    """Return each number over the largest magnitude of its column; 0 where it is not finite."""
    known = [0.0 if x is None or not math.isfinite(x) else x for x in column]
    largest = max((abs(x) for x in known), default=0.0)
    return [x / largest if largest else 0.0 for x in known]


def _row(tag: str, cells: Sequence[str], numbers_from: int, tints: Sequence[float] | None) -> str:
    found = []
    for position, cell in enumerate(cells):
        align = "right" if position >= numbers_from else "left"
        style = f"{CELL};text-align:{align}"
        if tints is not None and tints[position]:
            colour = POSITIVE if tints[position] > 0 else NEGATIVE
            style += f";background:rgba({colour},{STRONGEST * abs(tints[position]):.2f})"
        found.append(f'<{tag} style="{style}">{escape(_short(cell))}</{tag}>')
    return f"<tr>{''.join(found)}</tr>"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
