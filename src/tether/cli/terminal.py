"""Sections of `explain` on a terminal, no wider than it is, and in files beside it."""

import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tether.errors import UserError
from tether.explain.document import Section, Table

if TYPE_CHECKING:
    from tether.ppo.evaluate import Evaluation
    from tether.ppo.probe import ProbeResult

READING_SECONDS = 5.0  # between two lines about a long file


def printable(text: str) -> str:
    """Return a text on one harmless line: line breaks, escape codes and direction marks are made
    visible."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def score_text(score: float, binary: bool) -> str:
    """Format a mean of 0/1 scores as a percentage, any other as a number."""
    return f"{score:.1%}" if binary else f"{score:.3f}"


def probe_table(found: "Mapping[str, ProbeResult]") -> str:
    """Return a probe's numbers by model; of two models, also how they differ, item by item."""
    rows = [["probe", *(part for name in found for part in (name, "95% interval"))]]
    results = list(found.values())
    kinds = {
        "facts": ([r.facts() for r in results if r.right], "{:.1%}"),
        "perplexity": ([r.perplexity() for r in results if r.nats], "{:.2f}"),
    }
    for kind, (values, form) in kinds.items():
        cells = [
            cell
            for x in values
            for cell in (form.format(x.mean), f"{form.format(x.low)} – {form.format(x.high)}")
        ]
        rows += [[kind, *cells]] if cells else []
    lines = [table(rows)]
    if len(results) == 2 and results[0].right:
        x = results[1].facts_gained(results[0])
        lines.append(
            f"  facts: {100 * x.mean:+.1f} points ({100 * x.low:+.1f} to {100 * x.high:+.1f})"
        )
    if len(results) == 2 and results[0].nats:
        x = results[1].perplexity_ratio(results[0])
        lines.append(f"  perplexity: x {x.mean:.3f} ({x.low:.3f} to {x.high:.3f})")
    return "\n".join(lines)


def sets_table(evaluation: "Evaluation") -> str:
    """Return the scores of each held-out set, with 95% intervals; of pass@k and maj@k the last."""
    names = [*evaluation.at_k]
    last = [name for name, after in zip(names, [*names[1:], ""], strict=True)
            if name.partition("@")[0] != after.partition("@")[0]]  # fmt: skip
    rows = [["set", "prompts", "greedy", "sampled", *last, "KL"]]
    for name, found in evaluation.sets.items():
        shown = [found.greedy, found.sampled, *(found.at_k.get(k) for k in last)]
        cells = ["–" if x is None else str(x) for x in shown]
        kl = "–" if found.kl is None else f"{found.kl:.3f}"
        rows.append([name, str(found.sampled.count), *cells, kl])
    return table(rows)


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a curve of at most `width` characters, from its lowest to its highest value.

    Where there are more values than characters, each character is the mean of its share. A value
    that is missing or not finite is a space where nothing else falls into its share; a curve
    without ups and downs is drawn in the middle.
    """
    shares = min(width, len(values))
    means = [_mean(values[i * len(values) // shares : (i + 1) * len(values) // shares])
             for i in range(shares)]  # fmt: skip
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * shares
    low, spread = min(known), max(known) - min(known)
    if spread <= 0 or not math.isfinite(spread):
        return "".join(" " if mean is None else BLOCKS[3] for mean in means)
    top = len(BLOCKS) - 1
    return "".join(
        " " if mean is None else BLOCKS[round(top * (mean - low) / spread)] for mean in means
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


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
    """Return aligned columns under a heading; those from `numbers_from` on are aligned right."""
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


# A wide character with the marks that may not begin a line, or a word with its spaces.
UNBREAKABLE = re.compile(r"[⺀-￿][，。；：、）”？]*\s*|[^\s⺀-￿]+\s*|\s+")
ANY_WIDTH = 10_000  # a file or a pipe has no edge to wrap at


def print_sections(sections: Sequence[Section]) -> None:
    """Print sections, every text through `printable`: some of it was written by a model."""
    width = terminal_width()
    for section in sections:
        print(printable(section.title))
        for block in section.blocks:
            if isinstance(block, str):
                print_wrapped(block, width)
            else:
                print_table(block, width)
        print()


def terminal_width() -> int:
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if known else ANY_WIDTH


def print_wrapped(text: str, width: int) -> None:
    """Indent a text by two and break it between words, or between characters of Chinese."""
    from rich.cells import cell_len

    line, used = "", 0
    for piece in UNBREAKABLE.findall(printable(text)):
        if line and used + cell_len(piece.rstrip()) > width - 2:
            print(f"  {line.rstrip()}")
            line, used = "", 0
        line += piece
        used += cell_len(piece)
    print(f"  {line.rstrip()}")


def print_table(block: Table, width: int) -> None:
    """Cut a table that is too wide into pieces, each with the labels again."""
    rows = [[printable(cell) for cell in row] for row in block.rows]
    labels = block.numbers_from if block.numbers_from < len(rows[0]) else 1
    for columns in _pieces(rows, labels, width):
        print(table([[row[i] for i in columns] for row in rows], block.numbers_from))


def _pieces(rows: list[list[str]], labels: int, width: int) -> list[list[int]]:
    """Return which columns go into each piece; the first `labels` go into all."""
    from rich.cells import cell_len

    needed = [3 + max(cell_len(row[i]) for row in rows) for i in range(len(rows[0]))]
    start = list(range(labels))
    pieces = [start]
    for i in range(labels, len(needed)):
        too_wide = sum(needed[j] for j in [*pieces[-1], i]) - 1 > width
        if too_wide and len(pieces[-1]) > labels:
            pieces.append(start)
        pieces[-1] = [*pieces[-1], i]
    return pieces


def write_text(path: Path, text: str) -> None:
    """Write the file asked for with --json or --html; half a surrogate pair is escaped."""
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {(error.strerror or '').lower()}.") from None
    print(f"  → {printable(str(path))}")
