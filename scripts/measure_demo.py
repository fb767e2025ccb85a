"""Run the demo over three seeds and paste the table into README.md: `make learn`.

Fails when the arithmetic recipe no longer learns what the README says it learns.
"""

import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from measure import machine, paste

import tether
from tether.cli.display import results_table
from tether.train.training import Result

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SEEDS = (0, 1, 2)


def main() -> None:
    results = [run(seed) for seed in SEEDS]
    paste(README, "demo table: made by `make learn`", describe(results))
    problems = shortfalls(results)
    print("\n".join(problems) or "The demo learns what it should.")
    sys.exit(1 if problems else 0)


def run(seed: int) -> Result:
    config = tether.load_config("arithmetic", {"seed": seed, "run.name": f"demo-seed{seed}"})
    print(f"seed {seed} …", flush=True)
    result = tether.train(config)
    print(results_table(result.before, result.after), f"\n  {result.train_seconds:.0f} s\n")
    return result


def describe(results: list[Result]) -> list[str]:
    middle = sorted(results, key=lambda r: r.after.sampled.mean)[len(results) // 2]
    seconds = [f"{r.train_seconds:.0f}" for r in results]
    sampled = [f"{r.after.sampled.mean:.1%}" for r in results]
    greedy = [f"{r.after.greedy.mean:.1%}" for r in results]
    return [
        results_table(middle.before, middle.after),
        "",
        f"  The median of {len(results)} seeds. All seeds: sampled {', '.join(sampled)};",
        f"  greedy {', '.join(greedy)}; training took {', '.join(seconds)} s.",
        f"  {machine()}",
    ]


def shortfalls(results: list[Result]) -> list[str]:
    """What the demo promises, as a median over the seeds."""

    def median(of) -> float:
        return statistics.median(of(r) for r in results)

    promises = {
        "sampled before is at most 60%": median(lambda r: r.before.sampled.mean) <= 0.60,
        "greedy before is at most 70%": median(lambda r: r.before.greedy.mean) <= 0.70,
        "sampled after is at least 85%": median(lambda r: r.after.sampled.mean) >= 0.85,
        "greedy rises by at least 15 points": median(
            lambda r: r.after.greedy.mean - r.before.greedy.mean
        )
        >= 0.15,
        "the intervals are apart": all(
            r.after.sampled.apart_from(r.before.sampled)
            and r.after.greedy.apart_from(r.before.greedy)
            for r in results
        ),
        "training takes at most 180 s": median(lambda r: r.train_seconds) <= 180,
    }
    return [f"NOT REACHED: {promise}" for promise, kept in promises.items() if not kept]


if __name__ == "__main__":
    main()
