"""Measuring a block: its sides take turns, each in a process of its own, and every finished turn
is written down, so that a stopped run goes on where it stopped."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.blocks import OURS, Block, Side
from bench.environments import NotThere, python_of
from bench.jobs import THREADS
from bench.models import CACHE, ROOT
from bench.protocol import Result

SPIN = {"OMP_NUM_THREADS": str(THREADS), "GOMP_SPINCOUNT": "1000", "TOKENIZERS_PARALLELISM": "0"}


class Turns:
    """The finished turns of one block, by side."""

    def __init__(self, block: Block, cache: Path = CACHE) -> None:
        self.block = block
        self.file = cache / "results" / f"{block.name}.json"
        self.made_by = sources()
        self.results: dict[str, list[Result]] = {side.name: [] for side in block.sides}
        self.missing: dict[str, str] = {}  # sides without an environment, and why
        if self.file.is_file():
            kept = json.loads(self.file.read_text(encoding="utf-8"))
            if kept["made_by"] == self.made_by and set(kept["results"]) == set(self.results):
                self.results, self.missing = kept["results"], kept["missing"]

    @property
    def complete(self) -> bool:
        """Whether every side has had a turn, but for those that may be missing."""
        return all(self.results[side.name] or side.optional for side in self.block.sides)

    def add(self, side: str, result: Result) -> None:
        self.results[side].append(result)
        self.missing.pop(side, None)
        self._keep()

    def leave_out(self, side: str, why: str) -> None:
        self.missing[side] = why
        self._keep()

    def _keep(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        kept = {"made_by": self.made_by, "results": self.results, "missing": self.missing}
        beside = self.file.with_suffix(".part")
        beside.write_text(json.dumps(kept), encoding="utf-8")
        beside.replace(self.file)  # whole or not at all, whenever the run is stopped


def measure(block: Block, repeats: int, cache: Path = CACHE) -> Turns:
    turns, gone = Turns(block, cache), set()
    repeats *= block.turns
    for number in range(repeats):
        for side in block.sides:
            if side.name in gone or len(turns.results[side.name]) > number:
                continue
            began = time.perf_counter()
            say(f"{block.name}: {side.name}, {number + 1} of {repeats} …")
            try:
                result = run(side, number)
            except NotThere as why:
                if not side.optional:
                    raise SystemExit(f"{why}") from None
                gone.add(side.name)
                turns.leave_out(side.name, str(why))
                say(f"  left out: {why}")
                continue
            turns.add(side.name, {**result, "load": os.getloadavg()[0]})
            took = time.perf_counter() - began
            say(f"  {describe(result)}; {took:.0f} s with loading")
    return turns


def run(side: Side, turn: int) -> Result:
    """One turn, in a process that sees two threads and our sources and nothing else of ours."""
    python = sys.executable if side.environment == OURS else python_of(side.environment)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [str(python), "-m", side.module],
        input=json.dumps({**side.job(), "turn": turn}),
        env={**os.environ, **SPIN, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise SystemExit(f"{side.name} failed ({side.module}):\n{tail}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def describe(result: Result) -> str:
    seconds = ", ".join(f"{s:.3g}" for s in result["seconds"]) or "not reached"
    return f"{seconds} s, peak {result['peak_mib']:.0f} MiB"


def sources() -> str:
    """A hash of all code that could change a number: old turns do not mix with new ones."""
    digest = hashlib.sha256()
    ours = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.yaml")]
    theirs = [*(ROOT / "bench").glob("*.py"), *(ROOT / "bench" / "ours").glob("*.py")]
    peers = [p for p in (ROOT / "bench" / "peers").rglob("*") if p.suffix in (".py", ".txt")]
    for path in sorted([*ours, *theirs, *peers]):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
