"""What a checkpoint of 4 GiB costs two processes: each hashes and verifies a share, against one
that does it all, as it was before. Turns alternate, so that both meet the same machine: a gain is
the median of what the turns gained. With --write the table goes into docs/scaling.md."""

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TURNS = 3
GIBIBYTES, TENSORS = 4.0, 64
BOUND = 1.7  # times as fast, hashing and verifying


def hash_alone(files: list[Path]) -> dict[str, str]:
    """As the first process did it: one file after the other."""
    hashes = {}
    for file in files:
        digest = hashlib.sha256()
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
        hashes[file.name] = digest.hexdigest()
    return hashes


def timed(compute: Callable[[], Any]) -> float:
    """How long all processes take together, from when all are there."""
    from tether.dist.collectives import gather

    gather(None)
    began = time.perf_counter()
    compute()
    gather(None)
    return time.perf_counter() - began


def save(run: Path, own: Any, shared: bool) -> None:
    """Write a checkpoint, wait for the disk, hash it, and move it to its place."""
    from tether.dist.collectives import gather, gather_results, on_first_process
    from tether.run.checkpoint_store import finish, seal_files, stage, sync
    from tether.train.checkpoint_files import write_tensors

    staged = on_first_process(lambda: stage(run, "000001"))
    file = write_tensors(staged / "actor_optimizer.safetensors", own)
    files = sorted(gather(file))

    def alone() -> list[dict[str, str]]:
        for file in files:
            sync(file)
        return [hash_alone(files)]

    if shared:
        sealed = gather_results(lambda: seal_files(staged, [file]))
    else:
        sealed = on_first_process(alone)
    hashes = {name: found for one in sealed for name, found in one.items()}
    on_first_process(lambda: finish(staged, "000001", hashes))


def measure(folder: Path, gibibytes: float) -> dict[str, list[float]]:
    """In each process: both ways of saving, hashing and verifying, in turns."""
    import torch

    from tether.dist.collectives import on_first_process
    from tether.dist.world import world
    from tether.train.checkpoint import newest_whole_by_all
    from tether.train.checkpoint_files import OwnTensors

    here, found = world(), {}
    writers = {f"x{i}": i % here.size for i in range(TENSORS)}
    mine = [name for name, writer in writers.items() if writer == here.rank]
    numbers = int(gibibytes * 2**30 / TENSORS / 4)
    tensors = {name: torch.randn(numbers) for name in mine}
    own = OwnTensors(tensors, writers, 4 * TENSORS * numbers)
    for turn in range(TURNS):
        for way in ("alone", "shared") if turn % 2 else ("shared", "alone"):
            run, shared = folder / f"{turn}-{way}", way == "shared"
            place = run / "checkpoints/000001"
            seconds = {"saved": timed(partial(save, run, own, shared))}
            files = sorted(place.glob("*.safetensors"))
            if shared:
                seconds["hashed"] = timed(partial(hash_alone, [files[here.rank]]))
                seconds["verified"] = timed(partial(newest_whole_by_all, run))
            else:
                by_one = partial(on_first_process, partial(hash_alone, files))
                seconds |= {what: timed(by_one) for what in ("hashed", "verified")}
            for what, took in seconds.items():
                found.setdefault(f"{what}, {way}", []).append(took)
            on_first_process(partial(shutil.rmtree, run))
    return found


def child(folder: str, gibibytes: float) -> None:
    from tether.dist.world import entered, world

    with entered("cpu", 1, 3600.0):
        found = measure(Path(folder), gibibytes)
        if world().is_first:
            print(json.dumps(found), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="paste the table into the document")
    parser.add_argument("--gibibytes", type=float, default=GIBIBYTES, help="of the checkpoint")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.gibibytes)
        return 0
    from measure import machine, paste

    from tether.cli.terminal import table

    with tempfile.TemporaryDirectory(prefix="tether-checkpoints-", dir=ROOT) as folder:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = [str(Path(__file__).resolve()), "--child", folder]
        size = ["--gibibytes", str(arguments.gibibytes)]
        command = [sys.executable, *torchrun, *script, *size]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("{")))
    title = f"{arguments.gibibytes:g} GiB, two processes"
    rows, gains = [[title, "one does it", "each a share", "gain"]], {}
    for what in ("hashed", "verified", "saved"):
        turns = found[f"{what}, alone"], found[f"{what}, shared"]
        alone, shared = map(statistics.median, turns)
        gains[what] = statistics.median(a / b for a, b in zip(*turns, strict=True))
        label = "saved: written, synced, hashed" if what == "saved" else what
        rows.append([label, f"{alone:.1f} s", f"{shared:.1f} s", f"{gains[what]:.2f} x"])
    lines = [*table(rows).splitlines(), "", f"medians of {TURNS} alternating turns", machine()]
    print("\n".join(lines))
    if arguments.write:
        paste(ROOT / "docs" / "scaling.md", "measure_large_checkpoints", lines)
    return int(min(gains["hashed"], gains["verified"]) < BOUND or gains["saved"] < 1)


if __name__ == "__main__":
    sys.exit(main())
