"""Measure what dynamic sampling saves, and paste it into docs/updates.md.

    python scripts/measure_dynamic_sampling.py            # measure what is missing, print
    python scripts/measure_dynamic_sampling.py --write    # and paste

The recipe `arithmetic` by GRPO with eight responses a prompt, once on the groups as they were
sampled and once with those without a spread replaced. Both get the same search, over the actor's
rate and the groups of an iteration (smaller batches, more of them), on seed 100, by the held-out
score after the same number of sampled rows; then three seeds. The learning rate is constant, so a
run may be read at any number of rows. Some 40 processor minutes.

Results are kept under docs/results by a hash of their settings: another machine goes on. The
settings stood here before the first run on seeds 0 to 2. Exits 1 if 5% or more of the rows that are
trained on have no gradient, or if an equal score took more than 75% of the sampled rows.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from measure import paste
from yardstick_runs import one_run
from yardstick_store import KEPT, ROOT, Store, minutes

from tether.cli.terminal import table

RECIPE = Path(str(files("tether.recipes").joinpath("arithmetic.yaml")))
CODE = ("scripts/measure_dynamic_sampling.py", "src/tether")
SEEDS, SEARCH_SEED = (0, 1, 2), 100
SAMPLES = 8
ROWS = 12_288  # sampled by each run, at least
RATES, GROUPS = (4e-4, 2e-4, 8e-4), (32, 16)
SMOOTH = 3  # evaluations whose mean is a score
MOST_SHARE, MOST_ROWS = 0.05, 0.75
COMMON: Mapping[str, Any] = {
    "advantage.estimator": "grpo",
    "rollout.samples_per_prompt": SAMPLES,
    "kl.in_reward.coef": 0.0,
    "actor.schedule": "constant",
    "run.rollouts_every": 0,
    "train.eval_samples": 4,
}
PLAIN, REFILLED = "as sampled", "refilled"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    REFILLED: {"rollout.dynamic_sampling.max_rounds": 10},
}
# Of the iterations that the plain run needs for as many rows: about half of the starter's groups
# have no spread, so a refilled iteration samples about twice as many.
ITERATIONS = {PLAIN: 1.0, REFILLED: 0.75}
COLUMNS = (
    "score/mean",
    "advantage/zero_spread_share",
    "rollout/prompts_drawn",
    "rollout/no_spread_share",
)


@dataclass(frozen=True)
class Settings:
    """What the search chooses."""

    rate: float
    groups: int  # of an iteration


@dataclass(frozen=True)
class Trial:
    """What one run gave."""

    curve: list[tuple[float, float]]  # (sampled rows, held-out score), smoothed
    idle: float  # share of the rows trained on that have no gradient
    without_spread: float  # share of the sampled groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="paste into docs/updates.md")
    parser.add_argument("--search", action="store_true", help="only the search, on seed 100")
    parser.add_argument("--results", type=Path, default=KEPT, help="one file a run")
    options = parser.parse_args()
    store = Store(options.results, Path("runs/dynamic-sampling"))
    chosen = {name: best_settings(store, name) for name in VARIANTS}
    print(*(f"{name}: {settings}" for name, settings in chosen.items()), sep="\n")
    if options.search:
        return
    results = {
        name: [one_cell(store, name, settings, seed) for seed in SEEDS]
        for name, settings in chosen.items()
    }
    found = {name: [read_trial(r, chosen[name]) for r in some] for name, some in results.items()}
    lines = [describe(found, chosen), "", *verdict(found)]
    spent = minutes(result for some in results.values() for result in some)
    below = [f"  {spent:.1f} processor minutes.", *(f"  {m}" for m in store.machines)]
    print(*lines, *below, sep="\n")
    if options.write:
        marker = "dynamic sampling: made by `python scripts/measure_dynamic_sampling.py --write`"
        paste(ROOT / "docs" / "updates.md", marker, [*lines, "", *below])
    sys.exit(0 if all(signs(found).values()) else 1)


def best_settings(store: Store, name: str) -> Settings:
    """Return the settings with the best held-out score at `ROWS` on the search's seed."""

    def score(settings: Settings) -> float:
        result = one_cell(store, name, settings, SEARCH_SEED)
        return score_at(ROWS, read_trial(result, settings).curve)

    return max((Settings(*pair) for pair in product(RATES, GROUPS)), key=score)


def fields_of(name: str, settings: Settings) -> dict[str, Any]:
    iterations = round(ITERATIONS[name] * ROWS / (settings.groups * SAMPLES))
    return {
        **COMMON,
        **VARIANTS[name],
        "actor.lr": settings.rate,
        "rollout.prompts": settings.groups,
        "train.iterations": iterations,
        "train.eval_every": max(1, iterations // 16),
        "train.checkpoint_every": iterations,
    }


def one_cell(store: Store, name: str, settings: Settings, seed: int) -> dict[str, Any]:
    fields = {**fields_of(name, settings), "seed": seed}
    kept = f"refill-{name.replace(' ', '-')}-seed{seed}"
    return one_run(store, kept, RECIPE, fields, dict, CODE, columns=COLUMNS)


def read_trial(result: Mapping[str, Any], settings: Settings) -> Trial:
    curves = result["curves"]
    drawn = curves.get("rollout/prompts_drawn", [settings.groups] * len(curves["score/mean"]))
    rows = [0.0, *(SAMPLES * prompts for prompts in accumulate(drawn))]
    evals = result["evals"]
    scores = [line["sampled"]["mean"] for line in evals]
    curve = [
        (rows[line["iteration"]], statistics.fmean(scores[max(0, i - SMOOTH + 1) : i + 1]))
        for i, line in enumerate(evals)
    ]
    idle = statistics.fmean(curves["advantage/zero_spread_share"])
    without = curves.get("rollout/no_spread_share")
    return Trial(curve, idle, idle if without is None else weighted(without, drawn))


def weighted(shares: Sequence[float], counts: Sequence[float]) -> float:
    return sum(s * n for s, n in zip(shares, counts, strict=True)) / sum(counts)


def score_at(rows: float, curve: Sequence[tuple[float, float]]) -> float:
    """Return the score of the last evaluation with at most so many rows."""
    return [score for at, score in curve if at <= rows][-1]


def rows_until(score: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """Return the sampled rows of the first evaluation with this score."""
    return next((at for at, found in curve if found >= score), None)


def shares(found: Mapping[str, Sequence[Trial]]) -> list[float | None]:
    """Return, seed by seed, the rows that refilling needs for the plain run's last score, over
    those that the plain run needed."""
    pairs = []
    for plain, refilled in zip(found[PLAIN], found[REFILLED], strict=True):
        goal = plain.curve[-1][1]
        needed, other = (rows_until(goal, trial.curve) for trial in (plain, refilled))
        pairs.append(None if other is None else other / needed)
    return pairs


def describe(found: Mapping[str, Sequence[Trial]], chosen: Mapping[str, Settings]) -> str:
    head = ["groups", "rate", "per iteration", "sampled without spread", "trained without gradient"]
    rows = [[*head, f"held out at {ROWS} rows"]]
    for name, trials in found.items():
        rows.append(
            [
                name,
                f"{chosen[name].rate:g}",
                f"{chosen[name].groups}",
                f"{statistics.fmean(t.without_spread for t in trials):.1%}",
                f"{statistics.fmean(t.idle for t in trials):.1%}",
                ", ".join(f"{score_at(ROWS, t.curve):.1%}" for t in trials),
            ]
        )
    return table(rows)


def signs(found: Mapping[str, Sequence[Trial]]) -> dict[str, bool]:
    """Return what is asked of dynamic sampling, and whether it was found."""
    ratios = shares(found)
    return {
        "under 5% of the rows trained on have no gradient": all(
            trial.idle < MOST_SHARE for trial in found[REFILLED]
        ),
        "an equal score in at most 75% of the sampled rows, every seed": all(
            ratio is not None and ratio <= MOST_ROWS for ratio in ratios
        ),
    }


def verdict(found: Mapping[str, Sequence[Trial]]) -> list[str]:
    told = ", ".join("not reached" if r is None else f"{r:.0%}" for r in shares(found))
    return [
        f"  Rows until the score that the groups as sampled end with, of theirs, by seeds: {told}.",
        *(f"  {sign}: {'yes' if held else 'no'}" for sign, held in signs(found).items()),
    ]


if __name__ == "__main__":
    main()
