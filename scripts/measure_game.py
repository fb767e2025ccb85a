"""Compare a reward per turn with the same total at the end, in the recipe `game`.

    python scripts/measure_game.py [--seeds 0 1 2] [--write]

Trains PPO with either pay and GRPO beside them, on the same games, and evaluates after every second
iteration. Goes on where it stopped: runs that the folder has are not trained again. With --write
the table goes into docs/games.md and its curves into docs/figures/. Exits 1 if a reward per turn
is not ahead: apart at half time, and at the other's final level in at most 60% of the iterations.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from measure import machine, paste

import tether
from tether.cli.terminal import table
from tether.config.load import load_config
from tether.ppo.evaluate import Evaluation, read_evaluations

DOCS = Path(__file__).resolve().parent.parent / "docs"
DOCUMENT, FIGURE = DOCS / "games.md", DOCS / "figures" / "game.svg"
MARKER = "game: made by `python scripts/measure_game.py --write`"
ITERATIONS, ROWS, SAMPLES, EVAL_EVERY = 8, 128, 8, 2
TURN, END, GRPO = "PPO, reward per turn", "PPO, total at the end", "GRPO, total at the end"
# Lambda is each way's best of 0.5, 0.95 and 1 on seed 100.
WAYS: dict[str, dict[str, Any]] = {
    TURN: {"advantage.lam": 0.5},
    END: {"pay": "end", "advantage.lam": 1.0},
    GRPO: {"pay": "end", "samples": SAMPLES, "advantage.estimator": "grpo"},
}
Curves = Mapping[str, Sequence[Sequence[Evaluation]]]  # by way, then by seed, then by iteration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/measure-game"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--write", action="store_true", help="paste into docs/games.md")
    args = parser.parse_args()
    found: dict[str, list[list[Evaluation]]] = {name: [] for name in WAYS}
    for seed in args.seeds:
        for name in WAYS:
            print(f"{name}, seed {seed} …", flush=True)
            found[name].append(trained(name, seed, args.folder))
    lines = [describe(found, args.seeds), "", *verdicts(found, args.seeds), "", f"  {settings()}"]
    print("\n" + "\n".join(lines))
    if args.write:
        paste(DOCUMENT, MARKER, lines)
        draw(found, FIGURE)
    sys.exit(any("NO" in line for line in verdicts(found, args.seeds)))


def trained(name: str, seed: int, folder: Path) -> list[Evaluation]:
    """Train one way on one seed, unless it is there; return its evaluations."""
    run = folder / f"{name.replace(',', '').replace(' ', '-')}-{seed}"
    if not (run / "evals.jsonl").exists() or read_evaluations(run)[-1].iteration < ITERATIONS:
        fields = overrides(WAYS[name], seed, run)
        tether.train(load_config("game", {**fields, "run.overwrite": True}))
    return read_evaluations(run)


def overrides(way: Mapping[str, Any], seed: int, run: Path) -> dict[str, Any]:
    arguments = {"turns": 6, "pay": way.get("pay", "turn")}
    samples = way.get("samples", 1)
    return {
        "run.dir": str(run),
        "run.rollouts_every": 0,
        "rollout.environment": {"kind": "tether.tasks.ladder:Ladder", "arguments": arguments},
        "rollout.prompts": ROWS // samples,
        "rollout.samples_per_prompt": samples,
        "train.iterations": ITERATIONS,
        "train.eval_every": EVAL_EVERY,
        "train.checkpoint_every": 0,
        "seed": seed,
        "threads": 1,
        **{field: value for field, value in way.items() if "." in field},
    }


def describe(found: Curves, seeds: Sequence[int]) -> str:
    iterations = [e.iteration for e in found[TURN][0]]
    rows = [["held-out total", "seed", *(f"iteration {i}" for i in iterations)]]
    for name, runs in found.items():
        for seed, evaluations in zip(seeds, runs, strict=True):
            cells = [
                f"{e.sampled.mean:.2f} ({e.sampled.low:.2f} – {e.sampled.high:.2f})"
                for e in evaluations
            ]
            rows.append([name, str(seed), *cells])
    return table(rows)


def verdicts(found: Curves, seeds: Sequence[int]) -> list[str]:
    """Say seed by seed how a reward per turn stands to the same total at the end."""
    said = []
    for seed, turn, end in zip(seeds, found[TURN], found[END], strict=True):
        middle = next(i for i, e in enumerate(turn) if e.iteration >= ITERATIONS / 2)
        apart = turn[middle].sampled.apart_from(end[middle].sampled)
        ahead = apart and turn[middle].sampled.mean > end[middle].sampled.mean
        level = end[-1].sampled.mean
        reached = [e.iteration for e in turn if e.sampled.mean >= level]
        soon = bool(reached) and reached[0] <= 0.6 * ITERATIONS
        when = f"by iteration {reached[0]}" if reached else "never"
        said.append(
            f"  Seed {seed}: intervals apart at half time: {'yes' if ahead else 'NO'}; the other's "
            f"final level, {level:.2f}, {when} of {ITERATIONS}: {'yes' if soon else 'NO'}."
        )
    return [*said, _means(found)]


def _means(found: Curves) -> str:
    """Return the means over the seeds, way by way: at half time and at the end."""
    cells = []
    for name, runs in found.items():
        middle = next(i for i, e in enumerate(runs[0]) if e.iteration >= ITERATIONS / 2)
        half, last = (statistics.mean(run[i].sampled.mean for run in runs) for i in (middle, -1))
        cells.append(f"{name} {half:.2f} and {last:.2f}")
    return f"  Means over the seeds at half time and at the end: {'; '.join(cells)}."


def settings() -> str:
    return (
        f"{ROWS} games per iteration (GRPO: {ROWS // SAMPLES}, {SAMPLES} times each), intervals of "
        f"95% over 200 held-out games, one thread. {machine()}"
    )


def draw(found: Curves, path: Path) -> None:
    """Draw a line for the mean of the seeds and a band for their range."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tether"
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for number, (name, runs) in enumerate(found.items()):
        iterations = [e.iteration for e in runs[0]]
        scores = list(zip(*([e.sampled.mean for e in run] for run in runs), strict=True))
        colour = f"C{number}"
        axis.plot(iterations, [statistics.mean(s) for s in scores], color=colour, label=name)
        low, high = [min(s) for s in scores], [max(s) for s in scores]
        axis.fill_between(iterations, low, high, color=colour, alpha=0.2)
    axis.set(xlabel="iteration", ylabel="held-out total of six turns", ylim=(0, 6))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
