"""Side by side with the peers on this machine: `make bench`. Pastes its tables into
docs/performance.md.

Sides take turns, each in its own process with the same two threads and environment variables. A
stopped run goes on where it stopped; turns measured with other sources are not used again.
"""

import argparse
import shutil
import sys

from bench.blocks import Block, blocks
from bench.models import CACHE, ROOT, origin
from bench.report import block_lines, figures, gemm_lines, summary
from bench.rounds import Turns, measure

sys.path.append(str(ROOT / "scripts"))
from measure import machine, paste

DOCUMENT = ROOT / "docs" / "performance.md"
MARKER = "bench: made by `make bench`"


def main() -> None:
    chosen = blocks()
    names = [block.name for block in chosen]
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", action="append", choices=names, help="may be given repeatedly")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument("--fresh", action="store_true", help="forget earlier turns")
    parser.add_argument("--no-write", action="store_true", help="print, and leave the document")
    args = parser.parse_args()
    wanted = [block for block in chosen if block.name in (args.only or names)]
    if args.fresh:
        for block in wanted:
            (CACHE / "results" / f"{block.name}.json").unlink(missing_ok=True)
    shutil.rmtree(CACHE / "scratch", ignore_errors=True)
    fresh = {block.name: measure(block, args.repeats) for block in wanted}
    # The rest is what earlier runs have left.
    measured = [(block, fresh.get(block.name) or Turns(block)) for block in chosen]
    lines = report(measured)
    print("\n".join(lines))
    if not all(turns.complete for _, turns in measured):
        print("Not everything is measured yet, so the document stays as it was.")
    elif len({turns.made_by for _, turns in measured}) > 1:
        print("The sources changed meanwhile, so the document stays as it was.")
    elif not args.no_write:
        paste(DOCUMENT, MARKER, lines)


def report(measured: list[tuple[Block, Turns]]) -> list[str]:
    found = {block.name: figures(turns) for block, turns in measured}
    gemm = found.get("limits", {}).get("GEMM")
    rate = None if gemm is None else gemm.rate
    lines = [*summary(measured), ""]
    for block, turns in measured:
        if not any(turns.results.values()):
            continue
        if block.name == "limits":
            lines += gemm_lines(gemm, block.title)
        else:
            lines += block_lines(block, turns, rate)
    return [*lines, f"SmolLM2-135M: {origin('smollm2')}.", machine()]


if __name__ == "__main__":
    main()
