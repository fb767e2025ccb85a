"""Runs of tether as measurements: one PPO or SFT run, kept with its evaluations and curves."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from yardstick_store import Store

import tether
from tether import api
from tether.config.load import load_config
from tether.config.stages import SFTConfig
from tether.ppo.estimates import Estimate, wilson
from tether.run.directory import CONFIG, EVALS, METRICS, is_run
from tether.run.reader import read_lines

COLUMNS = ("score/mean", "response/length_mean", "kl/sequence_mean")


def one_run(
    store: Store,
    name: str,
    recipe: Path,
    fields: Mapping[str, Any],
    paths: Callable[[], Mapping[str, Any]],
    code: Sequence[str],
    beside: Mapping[str, Any] | None = None,
    columns: Sequence[str] = COLUMNS,
    also: Callable[[Path], dict[str, Any]] = lambda run: {},
) -> dict[str, Any]:
    """Train a recipe with some fields changed; return evaluations, and columns of its metrics.

    `paths` makes what the run needs and returns the fields that name it: they differ by machine, so
    they are no part of the settings. `beside` are further settings, of what was made. `also` reads
    what else is wanted from the finished run's files.
    """
    settings = {
        "recipe": recipe.read_text(encoding="utf-8"),
        "fields": dict(fields),
        "torch": version("torch"),
        **(beside or {}),
    }
    run = store.work / store.path(name, settings).stem

    def measure() -> dict[str, Any]:
        given = {"threads": 1, "run.dir": str(run), **fields, **paths()}
        config = load_config(recipe, given)
        same = is_run(run) and load_config(run / CONFIG).to_dict() == config.to_dict()
        if not same:  # a run under other settings has nothing to go on with
            shutil.rmtree(run, ignore_errors=True)
        result = tether.train(config, resume=same)
        if result.interrupted is not None:
            raise SystemExit(f"stopped; the same command goes on with {name} where it is")
        lines = read_lines(run / METRICS)
        there = [column for column in columns if column in lines[0]]  # no KL without a reference
        curves = {column: [round(line[column], 5) for line in lines] for column in there}
        return {"evals": read_lines(run / EVALS), "curves": curves, **also(run)}

    return store.measured(name, settings, measure, code)


def one_sft(recipe: Path, fields: Mapping[str, Any], run: Path) -> Path:
    """Train by `tether sft`, going on where it stopped; return the model's folder."""
    config = load_config(recipe, {"threads": 1, "run.dir": str(run), **fields}, SFTConfig)
    result = api.sft(config, resume=is_run(run))
    if result.interrupted is not None:
        raise SystemExit("stopped; the same command goes on")
    return result.checkpoint / "actor"


def pooled(estimates: Sequence[Mapping[str, Any]]) -> Estimate:
    """Return the share over several seeds' held-out questions, with Wilson's interval."""
    count = sum(e["count"] for e in estimates)
    mean = sum(e["mean"] * e["count"] for e in estimates) / count
    low, high = wilson(mean, count)
    return Estimate(mean, low, high, count, binary=True)


def shown(share: Estimate) -> str:
    return f"{share.mean:.1%} ({100 * share.low:.0f} – {100 * share.high:.0f})"


def largest_fall(scores: Sequence[float], window: int = 5) -> float:
    """Return how far the score, as a mean over a window of iterations, fell from its earlier best.

    That is 0 where it only rises.
    """
    means = [sum(scores[i : i + window]) / window for i in range(len(scores) - window + 1)]
    best, fall = means[0], 0.0
    for mean in means:
        best = max(best, mean)
        fall = max(fall, best - mean)
    return fall
