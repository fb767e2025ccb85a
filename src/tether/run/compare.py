"""Two runs side by side: settings that differ, metrics, and held-out scores with their intervals.

Read without failing, as the doctor reads: what is missing is in `notes`. Imports no torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.run.doctor.evidence import Evidence, Point, is_number, read_evidence
from tether.support import html

# What decides whether two scores mean the same.
TASK = ("data.train", "data.heldout", "data.system_prompt", "reward.", "rollout.tools",
        "rollout.environment", "train.eval_prompts")  # fmt: skip
BEST = ("score/mean", "reward/mean")  # where more is better, whatever else the run is about


@dataclass(frozen=True)
class Difference:
    """A config field that the runs have different values of; None where a run lacks it."""

    field: str
    left: str | None
    right: str | None


@dataclass(frozen=True)
class MetricPair:
    """One metric of both runs, by its last and, where more is better, its best iteration."""

    name: str
    left: Point | None
    right: Point | None
    left_best: Point | None = None
    right_best: Point | None = None


@dataclass(frozen=True)
class Interval:
    """A held-out mean after so many iterations, with its 95% interval where it has one."""

    iteration: int
    mean: float
    low: float | None
    high: float | None
    binary: bool

    def __str__(self) -> str:
        """Return the mean with its interval: of 0/1 scores as percentages."""
        known = [x for x in (self.mean, self.low, self.high) if x is not None]
        mean, *bounds = (f"{x:.1%}" if self.binary else f"{x:.3f}" for x in known)
        interval = f" ({bounds[0]} – {bounds[1]})" if len(bounds) == 2 else ""
        return f"{mean}{interval} at {self.iteration}"

    def apart_from(self, other: "Interval") -> bool:
        """Return whether the intervals do not overlap; False where one has no bounds."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return False
        return self.low > other.high or other.low > self.high


@dataclass(frozen=True)
class HeldOut:
    """The evaluations of one kind, sampled or greedy: the first, the best and the last."""

    first: Interval
    best: Interval
    last: Interval


@dataclass(frozen=True)
class Comparison:
    """Two runs, as far as both can be read."""

    left: str
    right: str
    config: Sequence[Difference]
    metrics: Sequence[MetricPair]
    heldout: Mapping[str, tuple[HeldOut | None, HeldOut | None]]  # by "sampled" and "greedy"
    other_task: Sequence[str] = field(default_factory=list)  # fields by which the tasks differ
    notes: Sequence[str] = field(default_factory=list)

    def _repr_html_(self) -> str:
        left, right = self.left, self.right
        found = [html.paragraph(note) for note in self.notes]
        if self.other_task:
            fields = ", ".join(self.other_task)
            said = f"The tasks differ ({fields}): scores of one are not scores of the other."
            found.insert(0, html.paragraph(said))
        if self.config:
            rows = [[d.field, d.left or "–", d.right or "–"] for d in self.config]
            found.append(html.table([["setting", left, right], *rows], numbers_from=3))
        else:
            found.append(html.paragraph("The settings are the same, or could not be read."))
        if self.metrics:
            rows = [[m.name, _last(m.left), _last(m.right)] for m in self.metrics]
            found.append(html.table([["metric, last", left, right], *rows]))
        held = [
            [f"{kind}, last", *("–" if h is None else str(h.last) for h in pair)]
            for kind, pair in self.heldout.items()
            if pair != (None, None)
        ]
        if held:
            found.append(html.table([["held-out", left, right], *held]))
        else:
            found.append(html.paragraph("Neither run was evaluated on held-out prompts."))
        return "".join(found)


def _last(point: Point | None) -> str:
    return "–" if point is None else f"{point.value:.4g} at {point.iteration}"


def compare_runs(left: Path, right: Path) -> Comparison:
    """Read two runs and put them side by side."""
    one, two = read_evidence(left), read_evidence(right)
    differences = config_differences(one.config, two.config)
    # A config that cannot be read says nothing about the task.
    known = bool(one.config) and bool(two.config)
    return Comparison(
        left=str(left),
        right=str(right),
        config=differences if known else [],
        metrics=_metric_pairs(one, two),
        heldout={
            kind: (_heldout(one, kind), _heldout(two, kind)) for kind in ("sampled", "greedy")
        },
        other_task=[d.field for d in differences if known and d.field.startswith(TASK)],
        notes=[f"{run}: {note}" for run, e in ((left, one), (right, two)) for note in e.notes],
    )


def config_differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Difference]:
    """Return the leaves that differ, by dotted name, in the order of the left config."""
    one, two = dict(_leaves(left)), dict(_leaves(right))
    names = dict.fromkeys([*one, *two])
    return [
        Difference(name, one.get(name), two.get(name))
        for name in names
        if one.get(name) != two.get(name)
    ]


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        found = []
        for name, inner in value.items():
            found += _leaves(inner, f"{prefix}.{name}" if prefix else str(name))
        return found
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return [(prefix, text)]


def _metric_pairs(one: Evidence, two: Evidence) -> list[MetricPair]:
    names = dict.fromkeys([*one.metric_names(), *two.metric_names()])
    pairs = []
    for name in names:
        series = one.series(name), two.series(name)
        last = [points[-1] if points else None for points in series]
        best: list[Point | None] = [None, None]
        if name in BEST:
            best = [max(points, key=lambda p: p.value) if points else None for points in series]
        pairs.append(MetricPair(name, *last, *best))
    return pairs


def _heldout(e: Evidence, kind: str) -> HeldOut | None:
    found = [_interval(line.get("iteration"), line.get(kind)) for line in e.evals]
    known = [interval for interval in found if interval is not None]
    if not known:
        return None
    return HeldOut(known[0], max(known, key=lambda interval: interval.mean), known[-1])


def _interval(iteration: Any, record: Any) -> Interval | None:
    if type(iteration) is not int or not isinstance(record, Mapping):
        return None
    mean, low, high = (record.get(name) for name in ("mean", "low", "high"))
    if not is_number(mean):
        return None
    return Interval(
        iteration,
        float(mean),
        float(low) if is_number(low) else None,
        float(high) if is_number(high) else None,
        record.get("binary") is True,
    )
