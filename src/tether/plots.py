"""Pictures of runs for a notebook, drawn by matplotlib (the extra `plots`).

Every function returns a matplotlib figure. What a run lacks is said in the picture, and the rest
is drawn. Without matplotlib they return a `NotDrawn`, which says so: a notebook goes on.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.errors import UserError
from tether.run.columns import WRITTEN
from tether.run.doctor.evidence import Evidence, is_number, read_evidence
from tether.run.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RunLike = str | os.PathLike[str]
MAIN = ("score/mean", "kl/sequence_mean", "actor/entropy", "response/length_mean")
COLUMNS = 2  # of a figure with several curves
MAX_TOKENS = 120  # of a row's picture: more would not be readable


def curves(*runs: RunLike, metrics: Sequence[str] = MAIN) -> "Figure | NotDrawn":
    """Draw metrics over the iterations, one curve per run; a single iteration is a point.

    runs     run directories, or objects with a `run` or a `directory` (a result, a started run)
    metrics  names of metrics.jsonl; docs/metrics.md says what each is
    """
    if not runs:
        raise UserError("Name at least one run: tether.plots.curves(result.run).")
    pyplot = _pyplot()
    if pyplot is None:
        return NotDrawn()
    read = {_label(run, runs): read_evidence(_folder(run)) for run in runs}
    height = -(-len(metrics) // COLUMNS)
    figure, axes = pyplot.subplots(
        height, COLUMNS, figsize=(9, 2.6 * height), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes.flat, metrics, strict=False):
        _draw(axis, name, read)
    for axis in list(axes.flat)[len(metrics) :]:
        axis.axis("off")
    if len(runs) > 1:
        axes.flat[0].legend(fontsize="small")
    pyplot.close(figure)  # a notebook shows what a cell returns; twice would be too much
    return figure


def heldout(*runs: RunLike) -> "Figure | NotDrawn":
    """Draw the held-out scores of sampled responses with their 95% intervals, one curve per run."""
    if not runs:
        raise UserError("Name at least one run: tether.plots.heldout(result.run).")
    pyplot = _pyplot()
    if pyplot is None:
        return NotDrawn()
    figure, axis = pyplot.subplots(figsize=(6, 3), layout="constrained")
    for run in runs:
        found = [_interval(line) for line in read_evidence(_folder(run)).evals]
        known = [interval for interval in found if interval is not None]
        if not known:
            continue
        at, mean, low, high = zip(*known, strict=True)
        below = [m - x for m, x in zip(mean, low, strict=True)]
        above = [x - m for m, x in zip(mean, high, strict=True)]
        axis.errorbar(at, mean, [below, above], marker="o", capsize=3, label=_label(run, runs))
    if not axis.has_data():
        _say(axis, "no evaluations on held-out prompts")
    elif len(runs) > 1:
        axis.legend(fontsize="small")
    axis.set_xlabel("iterations done")
    axis.set_title("held-out score, sampled", fontsize="medium")
    pyplot.close(figure)
    return figure


def tokens(
    row: Mapping[str, Any], columns: Sequence[str] = ("kl", "advantages")
) -> "Figure | NotDrawn":
    """Draw columns of one row over its tokens, as bars.

    row      of `iteration.row(n)` or `result.rows()`
    columns  names of `run/columns.py`
    """
    pyplot = _pyplot()
    if pyplot is None:
        return NotDrawn()
    row = Row(row)
    shown = [_plain(token) for token in row.tokens[:MAX_TOKENS]]
    figure, axes = pyplot.subplots(
        len(columns),
        1,
        figsize=(min(16, 2 + 0.45 * len(shown)), 1 + 1.6 * len(columns)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    known = {column.name: column.english for column in WRITTEN}
    for axis, name in zip(axes.flat, columns, strict=True):
        numbers = row.column(name)[:MAX_TOKENS]
        colours = ["#2458b3" if x >= 0 else "#c8501e" for x in numbers]
        axis.bar(range(len(numbers)), numbers, color=colours)
        axis.axhline(0, color="grey", linewidth=0.6)
        axis.set_title(f"{name}: {known.get(name, '')}", fontsize="small", loc="left")
    axes.flat[-1].set_xticks(range(len(shown)), shown, rotation=60, family="monospace")
    pyplot.close(figure)
    return figure


class NotDrawn:
    """Stands for a picture where matplotlib is not installed; using it raises that sentence."""

    sentence = (
        "tether.plots draws with matplotlib, which is not installed: pip install matplotlib, or "
        "the extra `plots`. The page needs nothing: tether view."
    )

    def __repr__(self) -> str:
        return self.sentence

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what a notebook asks every object for
            raise AttributeError(name)
        raise UserError(self.sentence)


def _draw(axis: Any, name: str, read: Mapping[str, Evidence]) -> None:
    for label, evidence in read.items():
        points = evidence.series(name)
        if points:
            marker = "o" if len(points) == 1 else None
            at, values = [p.iteration for p in points], [p.value for p in points]
            axis.plot(at, values, marker=marker, label=label)
    if not axis.has_data():
        _say(axis, "not in these runs")
    axis.set_title(name, fontsize="medium")
    axis.set_xlabel("iteration")


def _say(axis: Any, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)


def _interval(line: Mapping[str, Any]) -> tuple[int, float, float, float] | None:
    sampled, iteration = line.get("sampled"), line.get("iteration")
    if not isinstance(sampled, Mapping) or type(iteration) is not int:
        return None
    mean, low, high = (sampled.get(name) for name in ("mean", "low", "high"))
    if not is_number(mean):
        return None
    low, high = (bound if is_number(bound) else mean for bound in (low, high))
    return iteration, mean, low, high


def _folder(run: Any) -> Path:
    """Return the directory of a run, a result, or a run that is being stepped."""
    for name in ("run", "directory"):
        if isinstance(getattr(run, name, None), Path):
            return getattr(run, name)
    if not isinstance(run, str | os.PathLike):
        raise UserError(f"{type(run).__name__} is not a run; give its directory.")
    if not Path(run).is_dir():
        raise UserError(f"{run} is not a folder; name a run, `tether runs` lists them.")
    return Path(run)


def _label(run: Any, runs: Sequence[Any]) -> str:
    """Return the name of a run's folder, or its path where two have the same."""
    names = [_folder(other).name for other in runs]
    folder = _folder(run)
    return _plain(folder.name if names.count(folder.name) == 1 else str(folder))


def _plain(text: str) -> str:
    """Return a text that matplotlib takes as it is: a $ would begin a formula."""
    return "".join(c if c.isprintable() else "·" for c in text).replace("$", r"\$")


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        return None
    return pyplot
