"""Measure updates on rows that share their prompts against the same updates row by row.

    python scripts/measure_shared_prompts.py [--repeats 3] [--write]

The block `shared-prompts` of `make bench` alone: both ways take turns, each in a process of its
own. Exits 1 if a target is missed. With --write the table goes into docs/performance.md.
"""

import argparse
import sys
from pathlib import Path

from measure import machine, paste

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
from bench.blocks import shared_prompts  # noqa: E402
from bench.report import block_lines, figures, summary, verdict  # noqa: E402
from bench.rounds import measure  # noqa: E402

DOCUMENT = ROOT / "docs" / "performance.md"
MARKER = "shared prompts: made by `scripts/measure_shared_prompts.py --write`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=3, help="turns of each way")
    parser.add_argument("--write", action="store_true", help="paste into docs/performance.md")
    options = parser.parse_args()
    block = shared_prompts()
    turns = measure(block, options.repeats)
    lines = [*summary([(block, turns)]), "", *block_lines(block, turns, None), machine()]
    print("\n".join(lines))
    if options.write:
        paste(DOCUMENT, MARKER, lines)
    found = figures(turns)
    sys.exit(any(verdict(check, found).met is False for check in block.checks))


if __name__ == "__main__":
    main()
