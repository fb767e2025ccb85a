"""Text for a terminal. A model's words are data: whatever they are, they must not steer it."""

import sys
import time
from collections.abc import Callable

READING_SECONDS = 5.0  # between two lines about a long file


def printable(text: str) -> str:
    """Line breaks, escape codes and direction marks made visible: one harmless line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def score_text(score: float, binary: bool) -> str:
    """A mean of 0/1 scores reads as a percentage, any other as a number."""
    return f"{score:.1%}" if binary else f"{score:.3f}"


class ReadingLines:
    """Say every few seconds how far a data file has been read; of a short one, nothing."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.said = say, time.monotonic()

    def __call__(self, path: str, rows: int) -> None:
        if time.monotonic() - self.said >= READING_SECONDS:
            self.said = time.monotonic()
            self.say(f"reading    {printable(path)}: {rows:,} rows so far …")


def complain(message: str) -> None:
    for line in message.splitlines():
        print(f"tether: {printable(line)}", file=sys.stderr)


def table(rows: list[list[str]], numbers_from: int = 1) -> str:
    """Aligned columns, the first row as heading; columns from `numbers_from` on stand right."""
    widths = [max(_width(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: list[str]) -> str:
        cells = [
            " " * (width - _width(cell)) + cell
            if i >= numbers_from
            else cell + " " * (width - _width(cell))
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  " + "   ".join(cells).rstrip()

    rule = "  " + "   ".join("─" * width for width in widths)
    return "\n".join([line(rows[0]), rule, *(line(row) for row in rows[1:])])


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
