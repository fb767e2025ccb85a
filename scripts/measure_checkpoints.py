"""What saving costs: the median time of a checkpoint of the arithmetic recipe against ten of its
iterations, measured in one process and pasted into docs/reliability.md."""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from measure import machine, paste

from tether.config.load import load_config
from tether.dist.interrupt import Interrupt
from tether.train.checkpoint import Progress, save_checkpoint
from tether.train.ppo import PPOJob

ITERATIONS = 6
EVERY = 10


def main() -> None:
    config = load_config("arithmetic")
    torch.set_num_threads(config.threads)
    training = PPOJob(config).build(None)
    run = Path(tempfile.mkdtemp(prefix="tether-checkpoints-", dir="."))
    iterations, saves = [], []
    try:
        for i in range(ITERATIONS):  # alternating, so that both meet the same machine
            began = time.perf_counter()
            training.iterate(i, Interrupt())
            middle = time.perf_counter()
            save_checkpoint(run, Progress(i + 1), training, {})
            iterations.append(middle - began)
            saves.append(time.perf_counter() - middle)
        newest = run / "checkpoints" / f"{ITERATIONS:06d}"
        size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    finally:
        training.close()
        shutil.rmtree(run)
    iteration, save = statistics.median(iterations), statistics.median(saves)
    share = save / (EVERY * iteration)
    lines = [
        f"a checkpoint    {save:.3f} s, {size / 2**20:.1f} MiB: median of {ITERATIONS}",
        f"one iteration   {iteration:.3f} s: median of {ITERATIONS}, alternating",
        f"every {EVERY}th       {share:.2%} of the time",
        machine(),
    ]
    print("\n".join(lines))
    paste(Path(__file__).parent.parent / "docs" / "reliability.md", "measure_checkpoints", lines)


if __name__ == "__main__":
    main()
