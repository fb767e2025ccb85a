"""Paste the output of commands into the guide: `python scripts/build_guide.py`.

A block between `<!-- output of: COMMAND -->` and `<!-- end -->` is what COMMAND prints, or of that
the section whose title begins so: `<!-- output of: COMMAND (section: TITLE) -->`. The README's
measured table is carried over to the Chinese one. With --check nothing is written, and the exit
code is 1 if a page shows what is no longer printed.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.zh-CN.md", "docs/scaling.md", "docs/guide/*.md", "docs/zh/guide/*.md"]
BLOCK = re.compile(
    r"<!-- output of: (?P<command>.+?)(?: \(section: (?P<section>.+?)\))? -->\n.*?<!-- end -->",
    re.DOTALL,
)
COLUMNS = "120"
DEMO = re.compile(r"<!-- demo table: .+?<!-- end -->", re.DOTALL)


def pages() -> list[Path]:
    return sorted(path for pattern in PAGES for path in ROOT.glob(pattern))


def commands(text: str) -> list[str]:
    return [block["command"] for block in BLOCK.finditer(text)]


def refreshed(text: str, output_of: Callable[[str], str]) -> str:
    """The page with every block as its command prints it now."""

    def fresh(block: re.Match[str]) -> str:
        marker, _, _ = block[0].partition("\n")
        printed = output_of(block["command"])
        shown = section(printed, block["section"]) if block["section"] else printed
        return f"{marker}\n```console\n$ {block['command']}\n{shown}\n```\n<!-- end -->"

    return BLOCK.sub(fresh, text)


def section(printed: str, title: str) -> str:
    """The one section that begins so, with dots for what is left out."""
    [found] = [part for part in printed.split("\n\n") if part.startswith(title)]
    return f"…\n{found}\n…"


def with_demo_table(text: str) -> str:
    """The page with the README's measured table, if it shows one."""
    [measured] = DEMO.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    return DEMO.sub(lambda _: measured, text)


@cache
def output_of(command: str) -> str:
    """What `tether …` prints; run in this process, so that torch is imported once. What a plan says
    of the machine at hand, its free memory and its speed, is left out; bfloat16 takes the memory
    that it takes on most processors."""
    from tether.cli.main import app

    program, *arguments = shlex.split(command)
    if program != "tether":
        raise SystemExit(f"Only tether's own commands are run, not {command!r}.")
    runner = CliRunner(env={"COLUMNS": COLUMNS})
    no_machine = mock.patch("tether.planning.preview.this_machine", return_value=None)
    with no_machine, mock.patch("tether.models.precision.NATIVE", False):
        result = runner.invoke(app, arguments, catch_exceptions=False)
    if result.exit_code != 0:
        raise SystemExit(f"{command!r} ended with exit code {result.exit_code}:\n{result.output}")
    return "\n".join(line.rstrip() for line in result.stdout.strip("\n").splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is stale")
    check = parser.parse_args().check
    stale = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        fresh = with_demo_table(refreshed(text, output_of))
        if fresh == text:
            continue
        stale += 1
        print(f"{page.relative_to(ROOT)} {'is stale' if check else 'written'}")
        if not check:
            page.write_text(fresh, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
