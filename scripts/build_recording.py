"""Record the run that `tether view --demo` shows: `make recording`, about two minutes.

A short, real run of the arithmetic recipe on one thread, without its checkpoints.
"""

import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import tether

RECORDED = Path(tether.__file__).parent / "assets" / "recorded"
RUN = "arithmetic"
OVERRIDES = {
    "threads": 1,
    "run.name": RUN,
    "run.rollouts_every": 2,
    "run.rollouts_rows": 16,
    "train.iterations": 12,
    "train.eval_every": 4,
}
MAX_BYTES = 700_000


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / RUN
        result = tether.train(tether.load_config("arithmetic", {**OVERRIDES, "run.dir": str(run)}))
        shutil.rmtree(RECORDED / RUN, ignore_errors=True)
        shutil.copytree(run, RECORDED / RUN, ignore=shutil.ignore_patterns("checkpoints", "lock"))
    size = sum(path.stat().st_size for path in RECORDED.rglob("*") if path.is_file())
    assert size <= MAX_BYTES, f"{size:,} bytes are too many to ship"
    before, after = result.before.sampled.mean, result.after.sampled.mean
    print(f"{RECORDED / RUN}: {size:,} bytes, held-out {before:.1%} -> {after:.1%}")


if __name__ == "__main__":
    main()
