"""`make faults`: every fault that a run must survive, counted; exits 1 if anything was lost.

With --write the table goes into docs/reliability.md. A row that is done is kept in runs/faults/, so
that an hour that was interrupted goes on where it stopped; a changed source file starts it anew.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ["OMP_NUM_THREADS"] = "1"
# The fork server's children import from the tests folder too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])

from faults import hostile_inputs, interruptions  # noqa: E402
from faults.changed_inputs import row_r11  # noqa: E402
from faults.hangups import row_r12  # noqa: E402
from faults.row import Row  # noqa: E402
from faults.stage_kills import row_r9  # noqa: E402
from faults.unreadable_checkpoints import row_r10  # noqa: E402
from faults.world import make_world  # noqa: E402
from measure import machine, paste  # noqa: E402

from tether.cli.terminal import table  # noqa: E402


def rows(bench: interruptions.Bench, share: float) -> list[tuple[str, Callable[[], list[Row]]]]:
    """What to run, with the full number of tries or a share of them."""

    def some(tries: int) -> int:
        return max(1, round(tries * share))

    world, folder, seed = bench.world, bench.folder, bench.seed

    def of_inputs(name: str, tries: int) -> tuple[str, Callable[[], list[Row]]]:
        row = getattr(hostile_inputs, f"row_{name.lower()}")
        return name, lambda: [row(world, folder / name, some(tries), seed)]

    return [
        ("R1", lambda: interruptions.r1_kills(bench, some(100))),
        ("R2", lambda: [interruptions.r2_kills_in_save(bench, some(3))]),
        ("R3", lambda: [interruptions.r3_ten_kills(bench, some(10))]),
        ("R4", lambda: [interruptions.r4_signals(bench, some(5))]),
        ("R5", lambda: [interruptions.r5_disk(bench, some(51))]),
        ("R6", lambda: [interruptions.r6_damage(bench, some(300), resumed=some(30))]),
        ("R7", lambda: [interruptions.r7_every_iteration(bench)]),
        ("R9", lambda: [row_r9(world, folder / "R9", some(30), seed)]),
        ("R10", lambda: [row_r10(world, folder / "R10", some(12), seed)]),
        ("R11", lambda: [row_r11(world, folder / "R11", some(14), seed)]),
        ("R12", lambda: [row_r12(world, folder / "R12", some(10), seed)]),
        of_inputs("I1", 11),
        of_inputs("I2", 15),
        of_inputs("I3", 10),
        of_inputs("I4", 10_000),
        of_inputs("I5", 12),
        of_inputs("S5", 1_000),
        of_inputs("S6", 10),
        of_inputs("S7", 27),
        of_inputs("S8", 1),
        of_inputs("S9", 21),
        of_inputs("S10", 10),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the full number of tries")
    parser.add_argument("--only", nargs="*", default=[], help="rows, such as R1 I2")
    parser.add_argument("--write", action="store_true", help="paste into docs/reliability.md")
    options = parser.parse_args()

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup every child would ignore it
    folder = Path(tempfile.mkdtemp(prefix="tether-faults-"))
    done = DoneRows(options.seed, options.share)
    bench = interruptions.Bench(make_world(folder / "world"), folder, options.seed)
    found: list[Row] = []
    seconds = 0.0
    for name, run in rows(bench, options.share):
        if options.only and name not in options.only:
            continue
        print(f"{name} …", end=" ", flush=True)
        new, taken = done.get(name) or done.add(name, run)
        held = ", ".join(f"{row.number}: {row.held} of {row.tries} held" for row in new)
        print(f"{held} ({taken:.0f} s)", flush=True)
        found += new
        seconds += taken
    minutes = seconds / 60

    lost = [row for row in found if not row.holds]
    lines = [
        *table([["#", "fault", "tries", "held"], *map(_cells, found)], numbers_from=2).split("\n"),
        "",
        *(f"  {row.number}: {row.remark}." for row in found if row.remark),
        "",
        f"  {minutes:.0f} minutes, seed {options.seed}. {_verdict(lost)}",
    ]
    print("\n" + "\n".join(lines))
    if options.write:
        paste(ROOT / "docs" / "reliability.md", "make faults", [*lines, f"  {machine()}"])
    if not lost:
        shutil.rmtree(folder)
    sys.exit(1 if lost else 0)


class DoneRows:
    """Rows that were counted before, with the same source, seed and number of tries."""

    def __init__(self, seed: int, share: float) -> None:
        digest = hashlib.sha256()
        for folder in ("src/tether", "tests/faults"):
            for file in sorted((ROOT / folder).rglob("*.py")):
                digest.update(file.read_bytes())
        self.file = ROOT / "runs" / "faults" / f"{digest.hexdigest()[:16]}-{seed}-{share}.jsonl"

    def get(self, name: str) -> tuple[list[Row], float] | None:
        """Return the rows counted under this name and their seconds; None if they were not."""
        if not self.file.exists():
            return None
        for line in self.file.read_text().splitlines():
            kept = json.loads(line)
            if kept["name"] == name:
                return [Row(**row) for row in kept["rows"]], kept["seconds"]
        return None

    def add(self, name: str, run: Callable[[], list[Row]]) -> tuple[list[Row], float]:
        """Count the rows; keep them if they hold, as what was lost is to be tried again."""
        start = time.perf_counter()
        found = run()
        taken = time.perf_counter() - start
        if all(row.holds for row in found):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                kept = {"name": name, "rows": [asdict(row) for row in found], "seconds": taken}
                file.write(json.dumps(kept) + "\n")
        return found, taken


def _cells(row: Row) -> list[str]:
    return [row.number, row.fault, f"{row.tries:,}", f"{row.held:,}"]


def _verdict(lost: list[Row]) -> str:
    return f"LOST: {', '.join(row.number for row in lost)}" if lost else "Nothing was lost."


if __name__ == "__main__":
    main()
