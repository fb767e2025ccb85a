"""Train one recipe with every trust region and estimator, and lay the results side by side.

    python scripts/compare.py [RECIPE] [--seeds 3] [--iterations 12] [--only clip,trpo] [--write]

Each variant gets the same starting weights, prompts, rows and iterations, and the same small search
before: three learning rates, then two further values of its own main knob at the best of them, on
seeds that the table does not use. What is measured is kept under docs/results by a hash of its
settings, so a stopped comparison goes on where it stopped, on another machine too. With --write
the table and the figure go into docs/. Exits 1 if a variant does not improve by 15 points (--gain).
"""

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measure import paste
from yardstick_runs import one_run
from yardstick_store import KEPT, ROOT, Store

import tether
from tether.algo.least_kl import least_kl, log_moments, tilts
from tether.algo.pass_at_k import best_of_k
from tether.cli.terminal import table
from tether.config import ESTIMATORS, Config
from tether.config.load import load_config
from tether.run.directory import TIMINGS
from tether.run.reader import read_lines

Fields = Mapping[str, Any]
SEARCH_SEEDS = (100,)
RATES = (1.0, 0.5, 2.0)  # times the rate that is there
EVAL_EVERY = 3
REFERENCE_SAMPLES = 64  # per held-out prompt, for what best-of-n and the closed form cost
CODE = ("scripts/compare.py", "src/tether")


@dataclass(frozen=True)
class Variant:
    """What differs from the recipe, and what is searched over."""

    fields: Fields
    knob: Sequence[Fields]  # settings of its main knob; the first is tried with every rate
    rate: str = "actor.lr"  # the field that says how far a step goes


def one_field(name: str, *values: Any) -> list[Fields]:
    return [{name: value} for value in values]


def both_bounds(*values: float) -> list[Fields]:
    return [{"actor.update.eps_low": v, "actor.update.eps_high": v} for v in values]


def update(kind: str, knob: Sequence[Fields], **fields: Any) -> Variant:
    own = {name.replace("__", "."): value for name, value in fields.items()}
    return Variant({"actor.update.kind": kind, **own}, knob)


EPOCHS = one_field("actor.epochs", 2, 1, 4)
UPDATES = {
    "clip": update("clip", both_bounds(0.2, 0.1, 0.3)),
    "clip, higher above": update("clip", one_field("actor.update.eps_high", 0.28, 0.24, 0.4)),
    "clip, stop at a KL": update("clip", one_field("actor.stop_kl", 0.02, 0.01, 0.04)),
    "penalty": update("penalty", one_field("actor.update.target", 0.01, 0.003, 0.03)),
    "trpo": Variant(
        {"actor.update.kind": "trpo", "actor.update.max_kl": 0.02},
        one_field("actor.update.damping", 0.1, 0.03, 0.3),
        rate="actor.update.max_kl",
    ),
    "cpi": update("cpi", EPOCHS),
    "reinforce": update(
        "reinforce", one_field("actor.minibatch_rows", 64, 128, 256), actor__epochs=1
    ),
    "gspo": update("gspo", both_bounds(0.05, 0.02, 0.1)),
    "cispo": update("cispo", one_field("actor.update.eps_high", 0.28, 0.14, 0.56)),
    "dppo": update("dppo", one_field("actor.update.max_divergence", 0.15, 0.08, 0.3)),
}
LAMBDAS = {
    "two lambdas": Variant({"critic.lam": 1.0}, one_field("advantage.lam", 0.95, 0.9, 0.8)),
    "lambda by length": Variant(
        {"critic.lam": 1.0}, one_field("advantage.lam_alpha", 1.0, 0.5, 2.0)
    ),
    "two lambdas, value pretraining": Variant(
        {"critic.lam": 1.0, "critic.pretrain.explained_variance": None},
        one_field("critic.pretrain.max_epochs", 10, 5, 20),
    ),
}
OTHERS = {
    "KL of responses in the loss": Variant(
        {
            "kl.in_reward.coef": 0.0,
            "kl.in_loss.estimator": "k2",
            "kl.in_loss.level": "sequence",
            "actor.aggregation": "seq_mean_token_sum_norm",
        },
        one_field("kl.in_loss.coef", 0.01, 0.003, 0.03),
    ),
    "value head on the actor": Variant(
        {
            "critic.shared_trunk": True,
            **dict.fromkeys(("critic.lr", "critic.epochs", "critic.minibatch_rows")),
        },
        one_field("critic.coef", 0.5, 0.25, 1.0),
    ),
}
LONGER = "trpo, twice as long"  # with what was found for trpo: read off at clip's KL and seconds


def variants(base: Config) -> dict[str, Variant]:
    """Return all of them for a recipe. GDPO wants several rewards and distillation a teacher: they
    have measurements of their own."""
    return {**UPDATES, **LAMBDAS, **without_critic(base), **OTHERS}


def without_critic(base: Config) -> dict[str, Variant]:
    """Return the estimators without a critic; those of groups with groups of several sizes, at as
    many rows."""
    sizes = [n for n in (2, 4, 8, 16) if base.rows % n == 0][:3]
    groups = [{"rollout.samples_per_prompt": n, "rollout.prompts": base.rows // n} for n in sizes]
    return {
        name: Variant({"advantage.estimator": name}, groups if traits.by_group else EPOCHS)
        for name, traits in ESTIMATORS.items()
        if not (traits.needs_critic or traits.needs_teacher or traits.needs_parts)
    }


@dataclass(frozen=True)
class Point:
    """One evaluation of a run."""

    iteration: int
    score: float  # held out, sampled
    kl: float  # to the reference, nats per response
    seconds: float  # of the iterations before it


@dataclass(frozen=True)
class Trial:
    """What one run of one variant gave."""

    points: list[Point]
    greedy: float
    iteration_seconds: float  # the median

    @property
    def last(self) -> Point:
        return self.points[-1]


class Comparison:
    """The runs of one recipe, and where they are kept."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.recipe = recipe_path(options.recipe)
        self.base = load_config(self.recipe, {})
        self.iterations, self.tunes = options.iterations, not options.untuned
        self.store = Store(options.results, options.folder)
        self.variants = variants(self.base)

    def tuned(self, name: str) -> Fields:
        """Return a variant's fields with the rate and the setting of its knob that were best."""
        variant = self.variants[name]
        if not self.tunes:
            return {**variant.fields, **variant.knob[0]}
        first = {**variant.fields, **variant.knob[0]}
        rates = [{**first, variant.rate: factor * self.rate(variant)} for factor in RATES]
        best = self.best(name, rates)
        return self.best(name, [best, *({**best, **setting} for setting in variant.knob[1:])])

    def rate(self, variant: Variant) -> float:
        return variant.fields.get(variant.rate, self.base.actor.lr)

    def best(self, name: str, tried: Sequence[Fields]) -> Fields:
        """Return the first of the best by the held-out score after training."""

        def score(fields: Fields) -> float:
            trials = [self.trial(name, seed, fields) for seed in SEARCH_SEEDS]
            return statistics.fmean(trial.last.score for trial in trials)

        return max(tried, key=score)

    def trial(self, name: str, seed: int, fields: Fields) -> Trial:
        iterations = self.iterations * (2 if name == LONGER else 1)
        given = {
            **bank(fields, self.base),
            **fields,
            "seed": seed,
            "run.rollouts_every": 0,
            "train.eval_every": EVAL_EVERY,
            "train.iterations": iterations - ("critic.pretrain.max_epochs" in fields),
        }
        slug = "".join(c if c.isalnum() or c == "_" else "-" for c in name)
        kept = f"compare-{slug}-seed{seed}"
        return trial_of(
            one_run(self.store, kept, self.recipe, given, dict, CODE, also=read_seconds)
        )

    def reference_scores(self) -> list[list[float]]:
        """Return the scores of the reference's samples, prompt by prompt."""
        settings = {
            "recipe": self.recipe.read_text(encoding="utf-8"),
            "samples": REFERENCE_SAMPLES,
            "torch": version("torch"),
        }

        def measure() -> dict[str, Any]:
            fields = {"train.eval_samples": REFERENCE_SAMPLES, "threads": 1}
            found = tether.evaluate(self.base.model.actor, self.recipe, fields)
            scores = [[sample["score"] for sample in row["samples"]] for row in found.responses]
            return {"scores": scores}

        return self.store.measured("compare-reference", settings, measure, CODE)["scores"]


def bank(fields: Fields, base: Config) -> Fields:
    """Return, for value pretraining, how much it samples: an iteration's rows, and that iteration
    is not run, so that rows are equal."""
    pretrains = "critic.pretrain.max_epochs" in fields
    return {"critic.pretrain.prompts": base.rollout.prompts} if pretrains else {}


def recipe_path(recipe: str) -> Path:
    """Return the file of a recipe that ships, or of one's own."""
    own = Path(recipe)
    return own if own.is_file() else Path(str(files("tether.recipes").joinpath(f"{recipe}.yaml")))


def read_seconds(run: Path) -> dict[str, Any]:
    return {"iteration_seconds": [line["time/iteration"] for line in read_lines(run / TIMINGS)]}


def trial_of(result: Mapping[str, Any]) -> Trial:
    seconds = result["iteration_seconds"]
    points = [
        Point(
            iteration=line["iteration"],
            score=line["sampled"]["mean"],
            kl=line["kl"] or 0.0,
            seconds=sum(seconds[: line["iteration"]]),
        )
        for line in result["evals"]
    ]
    return Trial(points, result["evals"][-1]["greedy"]["mean"], statistics.median(seconds))


def main() -> None:
    options = parse()
    comparison = Comparison(options)
    names = options.only.split(",") if options.only else [*comparison.variants, LONGER]
    chosen = {name: comparison.tuned("trpo" if name == LONGER else name) for name in names}
    results = {
        name: [comparison.trial(name, seed, fields) for seed in range(options.seeds)]
        for name, fields in chosen.items()
    }
    lines = [describe(results, chosen, comparison), "", *equal_lines(results)]
    print(*lines, sep="\n")
    if options.write:
        write(lines, results, comparison, options)
    slow = [name for name, of_name in results.items() if gain(of_name) < options.gain]
    if slow:
        sys.exit(f"Less than {100 * options.gain:.0f} points gained by: {', '.join(slow)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="arithmetic")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--only", help="names of variants, with commas between")
    parser.add_argument("--untuned", action="store_true", help="no search: rates as in the recipe")
    parser.add_argument("--gain", type=float, default=0.15, help="what each variant must gain")
    parser.add_argument("--results", type=Path, default=KEPT, help="one file a run")
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"))
    parser.add_argument("--write", action="store_true", help="write docs/compare.md and its figure")
    return parser.parse_args()


def gain(trials: list[Trial]) -> float:
    return statistics.median(trial.last.score - trial.points[0].score for trial in trials)


def describe(
    results: Mapping[str, list[Trial]], chosen: Mapping[str, Fields], comparison: Comparison
) -> str:
    head = ["variant", "sampled", "lowest – highest", "greedy", "KL spent", "s per iteration"]
    rows = [[*head, "rate", "knob"]]

    def middle(values: Iterable[float]) -> float:
        return statistics.median(values)

    for name, trials in results.items():
        after = [trial.last.score for trial in trials]
        variant = comparison.variants["trpo" if name == LONGER else name]
        rows.append(
            [
                name,
                f"{middle(after):.1%}",
                f"{min(after):.1%} – {max(after):.1%}",
                f"{middle(t.greedy for t in trials):.1%}",
                f"{middle(t.last.kl for t in trials):.2f}",
                f"{middle(t.iteration_seconds for t in trials):.2f}",
                f"{chosen[name].get(variant.rate, comparison.rate(variant)):g}",
                knob_text(variant, chosen[name]),
            ]
        )
    return table(rows)


def knob_text(variant: Variant, chosen: Fields) -> str:
    """Return the value of the knob, by the last part of the first field's name."""
    [field, *_] = variant.knob[0]
    return f"{field.rpartition('.')[2]} {chosen[field]:g}"


def equal_lines(results: Mapping[str, list[Trial]]) -> list[str]:
    """Return what TRPO scores at clip's KL and at clip's seconds, seed by seed."""
    if not {"clip", LONGER} <= results.keys():
        return []
    lines = []
    for what in ("kl", "seconds"):
        found = [
            score_at(getattr(clip.last, what), what, trpo.points)
            for clip, trpo in zip(results["clip"], results[LONGER], strict=True)
        ]
        scores = ", ".join("not reached" if score is None else f"{score:.1%}" for score in found)
        clipped = ", ".join(f"{clip.last.score:.1%}" for clip in results["clip"])
        said = "as much KL as clip" if what == "kl" else "as many seconds as clip"
        lines.append(f"  TRPO at {said}, by seeds: {scores}; clip {clipped}.")
    return lines


def score_at(value: float, what: str, points: Sequence[Point]) -> float | None:
    """Return the score where the KL or the seconds first reach a value, between two evaluations by
    a line; None if they never do."""
    for before, after in pairwise(points):
        low, high = getattr(before, what), getattr(after, what)
        if low <= value <= high:
            share = (value - low) / (high - low) if high > low else 1.0
            return before.score + share * (after.score - before.score)
    return None


def best_of_n_curve(scores: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return (KL, mean score) of taking the best of n samples of the reference by the score itself;
    the KL is ln n - (n - 1)/n, an upper bound."""
    ns = [2**i for i in range(len(scores[0]).bit_length())]
    logs = torch.tensor(ns).double().log().tolist()
    return [
        (log - (n - 1) / n, statistics.fmean(best_of_k(row, n) for row in scores))
        for n, log in zip(ns, logs, strict=True)
    ]


def closed_form_curve(scores: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return (KL, mean score) of pi* ~ pi_ref exp(score / beta), from the reference's samples: the
    least KL that any policy needs for that score."""
    values = torch.tensor(scores).double()
    etas = tilts(values)
    moments = log_moments(values, torch.ones_like(values, dtype=torch.bool), etas).mean(dim=0)
    wanted = torch.linspace(float(values.mean()), float(values.max()), 200, dtype=torch.float64)
    least = least_kl(wanted, moments.expand(len(wanted), -1), etas)
    return [(k, s) for k, s in zip(least.tolist(), wanted.tolist(), strict=True) if k < 1e9]


def write(
    lines: Sequence[str],
    results: Mapping[str, list[Trial]],
    comparison: Comparison,
    options: argparse.Namespace,
) -> None:
    draw(results, comparison.reference_scores(), ROOT / "docs" / "figures" / "compare.svg")
    before = statistics.median(t.points[0].score for trials in results.values() for t in trials)
    how = "the recipe's own rates" if options.untuned else "tuned on seed 100"
    paste(
        ROOT / "docs" / "compare.md",
        "compare table: made by `make compare`",
        [
            *lines,
            "",
            f"  Held-out exact match of sampled responses, {before:.1%} before training; recipe",
            f"  {options.recipe}, {options.iterations} iterations, median of {options.seeds}",
            f"  seeds, one thread per run, {how}.",
            *(f"  {machine}" for machine in comparison.store.machines),
        ],
    )


def draw(results: Mapping[str, list[Trial]], scores: Sequence[Sequence[float]], path: Path) -> None:
    """Draw score over KL with the frontier, and over seconds."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tether"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5.5), sharey=True, layout="constrained")
    frontier = {
        "closed form: the least KL": (closed_form_curve(scores), "-"),
        "best of n": (best_of_n_curve(scores), "--"),
    }
    for label, (points, line) in frontier.items():
        kls, means = zip(*points, strict=True)
        axes[0].plot(kls, [100 * mean for mean in means], "k" + line, linewidth=1, label=label)
    for i, (name, trials) in enumerate(results.items()):
        style = {"color": f"C{i % 10}", "marker": "os^Dv"[i // 10], "linestyle": "none"}
        after = [100 * t.last.score for t in trials]
        axes[0].plot([t.last.kl for t in trials], after, label=name, **style)
        axes[1].plot([t.last.seconds for t in trials], after, **style)
    axes[0].set(xlabel="KL spent (nats per response)", ylabel="held-out exact match, sampled (%)")
    axes[1].set(xlabel="seconds of training (one thread)")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
