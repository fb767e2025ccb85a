"""`tether diff`: two runs side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether.cli.terminal import print_wrapped, printable, score_text, table, terminal_width
from tether.errors import UserError

if TYPE_CHECKING:
    from tether.run.compare import Comparison, HeldOut, Interval, MetricPair
    from tether.run.doctor.evidence import Point

NONE = "–"
# Shown without --all, as far as the runs have them.
MAIN = (
    "score/mean",
    "reward/mean",
    "response/length_mean",
    "response/eos_rate",
    "kl/sequence_mean",
    "kl/coef",
    "critic/explained_variance",
    "actor/entropy",
    "actor/approx_kl",
    "actor/pg_clipfrac",
    "loss",
    "accuracy",
)


def diff(
    left: Annotated[Path, typer.Argument(metavar="RUN", help="A run.")],
    right: Annotated[Path, typer.Argument(metavar="RUN", help="Another one.")],
    every: Annotated[bool, typer.Option("--all", help="Every metric, not only the main.")] = False,
) -> None:
    """Put two runs side by side: settings that differ, metrics, held-out scores."""
    from tether.run.compare import compare_runs

    for run in (left, right):
        if not run.is_dir():
            raise UserError(f"{run} is not a folder; name a run, `tether runs` lists them.")
    _print(compare_runs(left, right), every)


def _print(found: "Comparison", every: bool) -> None:
    width = terminal_width()
    left, right = _names(found)
    if found.other_task:
        fields = ", ".join(found.other_task)
        print_wrapped(
            f"The tasks differ ({fields}): scores of one are not scores of the other.", width
        )
        print()
    if found.config:
        rows = [[printable(d.field), _shown(d.left), _shown(d.right)] for d in found.config]
        print(table([["setting", left, right], *rows], numbers_from=9))
    else:
        print("  The settings are the same.")
    shown = [pair for pair in found.metrics if every or pair.name in MAIN]
    if shown:
        print()
        print(table([["metric", left, right, "difference"], *_metric_rows(shown)]))
    rows = [row for kind in found.heldout for row in _heldout_rows(kind, *found.heldout[kind])]
    if rows:
        print()
        print(table([["held-out", left, right, "difference"], *rows]))
    else:
        print("\n  Neither run was evaluated on held-out prompts.")
    for note in found.notes:
        print_wrapped(f"note: {note}", width)


def _names(found: "Comparison") -> tuple[str, str]:
    """Return the names of the runs' folders, or, where these are equal, their paths."""
    names = Path(found.left).name, Path(found.right).name
    names = (found.left, found.right) if names[0] == names[1] else names
    return printable(names[0]), printable(names[1])


LONGEST = 48  # characters of a setting


def _shown(value: str | None) -> str:
    if value is None:
        return NONE
    text = printable(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _metric_rows(pairs: "list[MetricPair]") -> list[list[str]]:
    rows = []
    for pair in pairs:
        rows.append([printable(pair.name), *_points(pair.left, pair.right)])
        if pair.left_best is not None or pair.right_best is not None:
            rows.append(
                [f"{printable(pair.name)}, best", *_points(pair.left_best, pair.right_best)]
            )
    return rows


def _points(left: "Point | None", right: "Point | None") -> list[str]:
    cells = [NONE if p is None else f"{p.value:.4g} at {p.iteration}" for p in (left, right)]
    change = NONE if left is None or right is None else f"{right.value - left.value:+.3g}"
    return [*cells, change]


def _heldout_rows(kind: str, left: "HeldOut | None", right: "HeldOut | None") -> list[list[str]]:
    if left is None and right is None:
        return []
    rows = []
    for when in ("first", "best", "last"):
        one, two = (None if held is None else getattr(held, when) for held in (left, right))
        rows.append([f"{kind}, {when}", _interval(one), _interval(two), _difference(one, two)])
    return rows


def _interval(held: "Interval | None") -> str:
    if held is None:
        return NONE
    mean = score_text(held.mean, held.binary)
    if held.low is None or held.high is None:
        return f"{mean} at {held.iteration}"
    low, high = (score_text(bound, held.binary) for bound in (held.low, held.high))
    return f"{mean} ({low} – {high}) at {held.iteration}"


def _difference(left: "Interval | None", right: "Interval | None") -> str:
    """Return the difference, and whether the two intervals leave room for chance."""
    if left is None or right is None:
        return NONE
    binary, change = left.binary and right.binary, right.mean - left.mean
    text = f"{100 * change:+.1f} points" if binary else f"{change:+.3f}"
    return f"{text}, intervals {'apart' if left.apart_from(right) else 'overlap'}"
