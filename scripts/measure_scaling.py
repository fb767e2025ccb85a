"""The arithmetic recipe alone, by torchrun and on Ray: the same numbers? And how fast?

    python scripts/measure_scaling.py [--only same|resume|speed] [--write]

Every run is the command that a user would type, in processes of its own. With --write the tables go
into docs/scaling.md. Exits 1 if numbers differ by more than the document says.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from measure import machine, paste

from tether.cli.terminal import table
from tether.run.reader import read_lines

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "scaling.md"
REPLAY = str(ROOT / "scripts" / "replay.py")
PYTHON = [sys.executable]
ITERATIONS = 10
BOUNDS = (1e-9, 1e-5, 1e-4)  # of the columns that `same` has
# 21 x 3 rows in minibatches of 20: nothing divides evenly among two.
RAGGED = {
    "threads": 1,
    "train.iterations": ITERATIONS,
    "train.eval_prompts": 4,
    "rollout.prompts": 21,
    "rollout.samples_per_prompt": 3,
    "actor.minibatch_rows": 20,
    "critic.minibatch_rows": 20,
    "actor.schedule": "constant",
    # With few rows the recipe's own rates are so high that rounding grows tenfold per iteration.
    "actor.lr": 1e-4,
    "critic.lr": 3e-4,
}
LOSSES_AND_SCORES = ("_loss", "score/", "kl/")
GRPO = {"advantage.estimator": "grpo", "critic.minibatch_rows": "null", "critic.lr": "null"}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "clip": {},
    "penalty": {"actor.update.kind": "penalty"},
    "grpo": GRPO,
    "trpo": {"actor.update.kind": "trpo", "train.iterations": ITERATIONS},
}
RAY = {"launch.kind": "ray", "launch.num_workers": 2}


def torchrun(processes: int) -> list[str]:
    port = socket.socket()
    port.bind(("127.0.0.1", 0))
    number = port.getsockname()[1]
    port.close()
    options = ["--nproc-per-node", str(processes), "--master-port", str(number)]
    return [*PYTHON, "-m", "torch.distributed.run", *options]


def run(
    folder: Path, fields: Mapping[str, Any], processes: int = 1, replay: list[str] | None = None
) -> Path:
    """One run of `tether train`, begun anew."""
    shutil.rmtree(folder, ignore_errors=True)
    words = ["train", "arithmetic", *options({**fields, "run.dir": folder})]
    program = [REPLAY, *replay] if replay else ["-m", "tether"]
    call([*(PYTHON if processes == 1 else torchrun(processes)), *program, *words])
    return folder


def options(fields: Mapping[str, Any]) -> list[str]:
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))]


def call(command: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")


def difference(
    one: Path, other: Path, iterations: int = ITERATIONS, names: tuple[str, ...] = ("",)
) -> float:
    """The largest relative one of these iterations, in metrics whose names hold one of these."""
    a, b = (read_lines(folder / "metrics.jsonl")[:iterations] for folder in (one, other))
    if not len(a) == len(b) == iterations:
        raise SystemExit(f"{one} and {other} have {len(a)} and {len(b)} iterations")
    return max(
        abs(x[name] - y[name]) / max(1.0, abs(x[name]))
        for x, y in zip(a, b, strict=True)
        for name in x
        if isinstance(x[name], float) and any(part in name for part in names)
    )


def same(scratch: Path) -> tuple[list[str], bool]:
    """The same metrics for every kind of update, in float64 and in float32."""
    rows = [["", "float64", "float32, first iteration", "float32, losses and scores"]]
    fine = True
    for kind, fields in KINDS.items():
        exact = {**RAGGED, **fields, "model.dtype": "float64"}
        usual = {**RAGGED, **fields, "model.dtype": "float32"}
        kept = str(scratch / f"{kind}-rollouts")
        shutil.rmtree(kept, ignore_errors=True)
        one = run(scratch / f"{kind}-1", exact)
        by_torchrun = run(scratch / f"{kind}-torchrun", exact, 2)
        by_ray = run(scratch / f"{kind}-ray", {**exact, **RAY})
        recorded = run(scratch / f"{kind}-recorded", usual, 1, ["record", kept])
        replayed = run(scratch / f"{kind}-replayed", usual, 2, ["replay", kept])
        found = [
            difference(one, by_torchrun),
            difference(recorded, replayed, 1),
            difference(recorded, replayed, names=LOSSES_AND_SCORES),
        ]
        apart = difference(by_torchrun, by_ray)
        rows.append([f"{kind}, torchrun", *(f"{x:.0e}" for x in found)])
        rows.append(
            [f"{kind}, Ray", f"{difference(one, by_ray):.0e}", f"{apart:g} to torchrun", ""]
        )
        print(rows[-2:], flush=True)
        fine = fine and apart == 0 and all(x <= y for x, y in zip(found, BOUNDS, strict=True))
    title = "two processes: largest difference to one in any metric of 10 iterations, relative"
    return [title, "", *table(rows).splitlines()], fine


def resume(scratch: Path) -> tuple[list[str], bool]:
    """A run stopped after five iterations goes on with another number of processes."""
    exact = {**RAGGED, "model.dtype": "float64"}
    whole = run(scratch / "whole", exact)
    rows, fine = [["resumed at iteration 5", "largest difference to one process"]], True
    for before, after in ((2, 1), (1, 2)):
        folder = run(scratch / f"{before}-{after}", {**exact, "train.iterations": 5}, before)
        command = PYTHON if after == 1 else torchrun(after)
        wanted = ["resume", str(folder), "--train.iterations", str(ITERATIONS)]
        call([*command, "-m", "tether", *wanted])
        found = difference(whole, folder)
        fine = fine and found < 1e-9
        rows.append([f"{before} → {after} processes", f"{found:.0e}"])
    return table(rows).splitlines(), fine


def speed(scratch: Path) -> tuple[list[str], bool]:
    """Rows a second: one process of two threads, two of one; alternating, medians."""
    fields = {"train.iterations": 5, "train.eval_prompts": 8, "train.checkpoint_every": 0}
    times: dict[str, list[Mapping[str, float]]] = {"1 × 2 threads": [], "2 × 1 thread": []}
    for _ in range(2):
        for name, processes, threads in (("1 × 2 threads", 1, 2), ("2 × 1 thread", 2, 1)):
            folder = run(scratch / f"speed-{processes}", {**fields, "threads": threads}, processes)
            times[name] += read_lines(folder / "timings.jsonl")[1:]  # the first one warms up
    parts = ["time/rollout", "time/reward", "time/forward", "time/update", "time/iteration"]
    rows = [["s per iteration of 256 rows", *(part.partition("/")[2] for part in parts), "rows/s"]]
    pace = {}
    for name, found in times.items():
        medians = [median(line[part] for line in found) for part in parts]
        pace[name] = 256 / medians[-1]
        rows.append([name, *(f"{m:.2f}" for m in medians), f"{pace[name]:.0f}"])
    one, two = pace.values()
    lines = [*table(rows).splitlines(), "", f"two processes: {two / one:.2f} × the rows per second"]
    return lines, two >= 0.75 * one


PARTS: Mapping[str, Callable[[Path], tuple[list[str], bool]]] = {
    "same": same,
    "resume": resume,
    "speed": speed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "scaling")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    fine = True
    for name in args.only or PARTS:
        lines, good = PARTS[name](args.folder)
        print("\n".join(["", *lines]), flush=True)
        fine = fine and good
        if args.write:
            paste(DOCUMENT, f"{name}: made by `make scaling`", [*lines, "", machine()])
    if not fine:
        raise SystemExit("not within what was promised")


if __name__ == "__main__":
    main()
