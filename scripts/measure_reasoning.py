"""Train the recipe `reasoning` over three seeds; paste held-out scores into docs/reasoning-gym.md.

    python scripts/measure_reasoning.py [--seeds 0 1 2] [--threads 2] [--write]

A seed that was measured before under the same config is not run again, and one that was broken off
goes on where it stopped. Exits 1 if the interval after training is not above the one before it, or
if a run takes more than ten minutes.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from measure import machine, paste

import tether
from tether.cli.terminal import table
from tether.config import Config
from tether.ppo.estimates import Estimate
from tether.run.directory import CONFIG, TIMINGS, is_run
from tether.run.reader import read_lines

DOCS = Path(__file__).resolve().parent.parent / "docs"
MOST_MINUTES = 10


@dataclass(frozen=True)
class Cell:
    """What one run gave: mean scores of held-out questions, which reasoning-gym itself gives."""

    before: Estimate
    after: Estimate
    greedy_before: Estimate
    greedy_after: Estimate
    families: Mapping[str, tuple[Estimate, Estimate]]  # sampled, before and after
    kl: float
    minutes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/measure-reasoning"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="paste into docs/reasoning-gym.md")
    args = parser.parse_args()
    cells = {seed: measure(args.folder, seed, args.threads) for seed in args.seeds}
    lines = [describe(cells), "", f"  Threads {args.threads}. {machine()}"]
    print("\n" + "\n".join(lines))
    if args.write:
        paste(DOCS / "reasoning-gym.md", "measure_reasoning", lines)
    problems = [f"NOT REACHED: {problem}" for problem in shortfalls(cells)]
    print("\n".join(problems) or "The recipe learns what it should.")
    sys.exit(1 if problems else 0)


def measure(folder: Path, seed: int, threads: int) -> Cell:
    """Return a cell, from its file if that was measured under this config."""
    run = folder / f"seed{seed}"
    record = run.with_suffix(".json")
    config = tether.load_config(
        "reasoning", {"seed": seed, "threads": threads, "run.dir": str(run)}
    )
    if record.is_file():
        kept = json.loads(record.read_text(encoding="utf-8"))
        if kept["config"] == config.to_dict():
            return read_cell(kept["cell"])
    print(f"seed {seed} …", flush=True)
    cell = train(config, run)
    kept = {"config": config.to_dict(), "cell": asdict(cell)}
    record.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return cell


def train(config: Config, run: Path) -> Cell:
    same = is_run(run) and tether.load_config(run / CONFIG).to_dict() == config.to_dict()
    if not same:  # a run under an older config has nothing to go on with
        shutil.rmtree(run, ignore_errors=True)
    result = tether.train(config, resume=same)
    before, after = result.before, result.after
    return Cell(
        before=before.sampled,
        after=after.sampled,
        greedy_before=before.greedy,
        greedy_after=after.greedy,
        families={
            name: (scores.sampled, after.sets[name].sampled) for name, scores in before.sets.items()
        },
        kl=after.kl or 0.0,
        minutes=sum(line["time/iteration"] for line in read_lines(run / TIMINGS)) / 60,
    )


def read_cell(found: dict[str, Any]) -> Cell:
    whole = ("before", "after", "greedy_before", "greedy_after")
    families = {
        name: (Estimate(**before), Estimate(**after))
        for name, (before, after) in found["families"].items()
    }
    rest = {k: Estimate(**v) if k in whole else v for k, v in found.items()}
    return Cell(**{**rest, "families": families})


def describe(cells: Mapping[int, Cell]) -> str:
    """Return a table of all questions by seed, and one of each family."""
    rows = [["seed", "before", "after", "greedy before", "greedy after", "KL", "minutes"]]
    for seed, cell in cells.items():
        shares = (cell.before, cell.after, cell.greedy_before, cell.greedy_after)
        numbers = [f"{cell.kl:.2f}", f"{cell.minutes:.1f}"]
        rows.append([str(seed), *(shown(share) for share in shares), *numbers])
    first = next(iter(cells.values()))
    head = ["family, by seed", *(f"{seed}" for seed in cells)]
    of_families = [
        [name, *(f"{before.mean:.0%} to {after.mean:.0%}" for before, after in by_seed)]
        for name in first.families
        for by_seed in [[cell.families[name] for cell in cells.values()]]
    ]
    notes = (
        f"Mean score of {first.before.count} held-out questions, one sampled response each, and\n"
        "the greedy one; 95% intervals. KL to the starting model in nats per response."
    )
    return f"{table(rows)}\n\n{table([head, *of_families])}\n\n{notes}"


def shown(share: Estimate) -> str:
    return f"{share.mean:.1%} ({100 * share.low:.0f}-{100 * share.high:.0f})"


def shortfalls(cells: Mapping[int, Cell]) -> list[str]:
    """Return what the document promises of every seed and a run did not keep."""
    found = []
    for seed, cell in cells.items():
        if cell.after.low <= cell.before.high:
            found.append(f"seed {seed}: the intervals before and after are apart")
        if cell.minutes > MOST_MINUTES:
            found.append(f"seed {seed}: at most {MOST_MINUTES} minutes")
    return found


if __name__ == "__main__":
    main()
