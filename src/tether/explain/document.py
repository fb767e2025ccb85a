"""Titled sections of paragraphs and tables, and their static HTML page.

The page has no script, fetches nothing, and escapes every text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tether.explain.words import Language
from tether.support import html


@dataclass(frozen=True)
class Table:
    """Rows of text, the first one the heading; columns from `numbers_from` on align right."""

    rows: list[list[str]]
    numbers_from: int = 1


@dataclass(frozen=True)
class Section:
    """A title with what is below it."""

    title: str
    blocks: list[str | Table]  # paragraphs and tables, in order


def number(x: float | None) -> str:
    """Format with four decimals, or by exponent where these would show too little; None is –."""
    if x is None:
        return "–"
    if x == 0 or not math.isfinite(x):
        return f"{x:g}".removeprefix("-") if x == 0 else f"{x:g}"
    return f"{x:.4f}" if 1e-3 <= abs(x) < 1e5 else f"{x:.1e}"


STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #d9dee5;
  --paper: #ffffff; --band: #f4f6f9; --accent: #2458b3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa5b4; --line: #333c48;
  --paper: #14181e; --band: #1c222a; --accent: #8ab4ff; } }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1.25rem; background: var(--paper);
  color: var(--ink); font: 16px/1.6 system-ui, "Noto Sans SC", "PingFang SC", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; color: var(--accent); }
p { margin: .35rem 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); white-space: pre;
  unicode-bidi: isolate; }
tr:nth-child(even) td { background: var(--band); }
.number { text-align: right; }
p { unicode-bidi: isolate; }
"""


def to_html(sections: Sequence[Section], language: Language) -> str:
    """Render sections as one page; the first section's title is the page's."""
    head, *rest = sections
    body = [f"<h1>{escape(head.title)}</h1>", *map(_block, head.blocks)]
    for section in rest:
        blocks = "\n".join(map(_block, section.blocks))
        body.append(f"<section>\n<h2>{escape(section.title)}</h2>\n{blocks}\n</section>")
    code = "zh-Hans" if language == "zh" else "en"
    text = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="{code}">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escape(head.title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{text}\n</main>\n</body>\n</html>\n"
    )


def to_fragment(sections: Sequence[Section]) -> str:
    """Render sections as part of a page, as a notebook shows an object."""
    found = []
    for section in sections:
        found.append(f"<h4>{escape(section.title)}</h4>")
        for block in section.blocks:
            found.append(
                html.paragraph(block)
                if isinstance(block, str)
                else html.table(block.rows, block.numbers_from)
            )
    return "".join(found)


def _block(block: str | Table) -> str:
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    heading, *rows = block.rows
    lines = [_row("th", heading, block.numbers_from)]
    lines += [_row("td", row, block.numbers_from) for row in rows]
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _row(tag: str, cells: Sequence[str], numbers_from: int) -> str:
    marked = (
        f"<{tag}{' class=number' if i >= numbers_from else ''}>{escape(cell)}</{tag}>"
        for i, cell in enumerate(cells)
    )
    return f"<tr>{''.join(marked)}</tr>"
