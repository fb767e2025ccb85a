"""Train one recipe with every trust region and estimator, and lay the results side by side.

    python scripts/compare.py [RECIPE] [--seeds 3] [--iterations 12] [--only clip,trpo] [--write]

Each variant gets the same starting weights, prompts, rows and iterations; two runs go side by
side with one thread each. Runs that are already there are not repeated. With --write the table
and the figure go into docs/. Exits 1 if a variant does not improve by 15 points (--gain).
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tether.cli.terminal import table
from tether.config import ESTIMATORS
from tether.run.directory import EVALS, METRICS, TIMINGS
from tether.run.reader import read_lines

ROOT = Path(__file__).resolve().parent.parent
SHARED = ["--critic.lr", "null", "--critic.epochs", "null", "--critic.minibatch_rows", "null"]

UPDATES = {
    "clip": [],
    "clip, stop at KL 0.02": ["--actor.stop_kl", "0.02"],
    "penalty": ["--actor.update.kind", "penalty"],
    "trpo": ["--actor.update.kind", "trpo", "--actor.update.max_kl", "0.02"],
    "cpi": ["--actor.update.kind", "cpi"],
    "reinforce": ["--actor.update.kind", "reinforce", "--actor.epochs", "1"],
    "gspo": [
        *("--actor.update.kind", "gspo"),
        *("--actor.update.eps_low", "0.05", "--actor.update.eps_high", "0.05"),
    ],
    "cispo": ["--actor.update.kind", "cispo"],
    "dppo": ["--actor.update.kind", "dppo"],
}
WITHOUT_CRITIC = {
    name: ["--advantage.estimator", name]
    for name, traits in ESTIMATORS.items()
    if not traits.needs_critic
}
SHARED_TRUNK = {"value head on the actor": ["--critic.shared_trunk", "true", *SHARED]}
VARIANTS = UPDATES | WITHOUT_CRITIC | SHARED_TRUNK


@dataclass(frozen=True)
class Trial:
    """What one run of one variant gave."""

    before: float
    after: float
    greedy: float
    kl: float
    seconds: float
    curve: list[tuple[float, float, float]]  # (seconds, KL to the reference, score) per iteration


def main() -> None:
    options = parse()
    names = options.only.split(",") if options.only else list(VARIANTS)
    jobs = [(name, seed) for name in names for seed in range(options.seeds)]
    with ThreadPoolExecutor(options.side_by_side) as pool:
        trials = list(pool.map(lambda job: run(*job, options), jobs))
    results = {name: [] for name in names}
    for (name, _), trial in zip(jobs, trials, strict=True):
        results[name].append(trial)
    text = describe(results)
    print(text)
    if options.write:
        write(text, results, options)
    slow = [name for name, of_name in results.items() if gain(of_name) < options.gain]
    if slow:
        sys.exit(f"Less than {100 * options.gain:.0f} points gained by: {', '.join(slow)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="arithmetic")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--only", help="names of variants, with commas between")
    parser.add_argument("--gain", type=float, default=0.15, help="what each variant must gain")
    parser.add_argument("--side-by-side", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"))
    parser.add_argument("--write", action="store_true", help="write docs/compare.md and its figure")
    return parser.parse_args()


def run(name: str, seed: int, options: argparse.Namespace) -> Trial:
    slug = "".join(c if c.isalnum() or c == "_" else "-" for c in name)
    directory = options.folder / f"{slug}-seed{seed}"
    if len(read_lines(directory / EVALS)) < 2:
        words = ["--seed", seed, "--threads", 1, "--train.iterations", options.iterations]
        words += ["--run.dir", directory, "--run.overwrite", "true", *VARIANTS[name]]
        command = [sys.executable, "-m", "tether", "train", options.recipe, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name}, seed {seed}: {done.stderr.strip()}")
    trial = read_trial(directory)
    print(f"{name}, seed {seed}: {trial.before:.1%} → {trial.after:.1%}", flush=True)
    return trial


def read_trial(directory: Path) -> Trial:
    evals, metrics = read_lines(directory / EVALS), read_lines(directory / METRICS)
    seconds, curve = 0.0, []
    for metric, timing in zip(metrics, read_lines(directory / TIMINGS), strict=True):
        seconds += timing["time/iteration"]
        curve.append((seconds, metric.get("kl/sequence_mean", 0.0), metric["score/mean"]))
    first, last = evals[0], evals[-1]
    return Trial(
        before=first["sampled"]["mean"],
        after=last["sampled"]["mean"],
        greedy=last["greedy"]["mean"],
        kl=last["kl"] or 0.0,
        seconds=seconds,
        curve=curve,
    )


def gain(trials: list[Trial]) -> float:
    return statistics.median(trial.after - trial.before for trial in trials)


def describe(results: dict[str, list[Trial]]) -> str:
    rows = [["variant", "sampled", "lowest – highest", "greedy", "KL spent", "s per iteration"]]

    def middle(values: Iterable[float]) -> float:
        return statistics.median(values)

    for name, trials in results.items():
        after = [trial.after for trial in trials]
        rows.append(
            [
                name,
                f"{middle(after):.1%}",
                f"{min(after):.1%} – {max(after):.1%}",
                f"{middle(t.greedy for t in trials):.1%}",
                f"{middle(t.kl for t in trials):.2f}",
                f"{middle(t.seconds / len(t.curve) for t in trials):.2f}",
            ]
        )
    return table(rows)


def write(text: str, results: dict[str, list[Trial]], options: argparse.Namespace) -> None:
    from measure import machine, paste

    draw(results, ROOT / "docs" / "figures" / "compare.svg")
    before = statistics.median(t.before for trials in results.values() for t in trials)
    paste(
        ROOT / "docs" / "compare.md",
        "compare table: made by `make compare`",
        [
            text,
            "",
            f"  Held-out exact match of sampled responses, {before:.1%} before training; recipe",
            f"  {options.recipe}, {options.iterations} iterations, median of {options.seeds}",
            f"  seeds, one thread per run. {machine()}",
        ],
    )


def draw(results: dict[str, list[Trial]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tether"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for i, (name, trials) in enumerate(results.items()):
        style = {"color": f"C{i % 10}", "marker": "os^Dv"[i // 10], "linestyle": "none"}
        axes[0].plot([t.kl for t in trials], [100 * t.after for t in trials], label=name, **style)
        axes[1].plot([t.seconds for t in trials], [100 * t.after for t in trials], **style)
    axes[0].set(xlabel="KL spent (nats per response)", ylabel="held-out exact match, sampled (%)")
    axes[1].set(xlabel="seconds of training (one thread)")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
