"""Metrics that know how they add up: a mean, a sum, an extreme, or a plain number.

They hold tensors until the end of an iteration, so that measuring never waits for a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from tether.types import ALL_HERE, Rows

Number = float | int | Tensor


@dataclass(frozen=True)
class Mean:
    """total / count; a mean over tokens adds token counts, so long rows weigh as they should."""

    total: Number
    count: Number

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        return float(self.total) / max(float(self.count), 1.0)


@dataclass(frozen=True)
class Sum:
    total: Number

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    def value(self) -> float:
        return float(self.total)


def _larger(one: Number, other: Number) -> Number:
    """Return the larger number; of two tensors on a GPU without waiting for them."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.where(other > one, other, one)
    return max(float(one), float(other))


@dataclass(frozen=True)
class Max:
    top: Number

    def merge(self, other: "Max") -> "Max":
        return Max(_larger(self.top, other.top))

    def value(self) -> float:
        return float(self.top)


@dataclass(frozen=True)
class Min:
    bottom: Number

    def merge(self, other: "Min") -> "Min":
        return Min(-_larger(-self.bottom, -other.bottom))

    def value(self) -> float:
        return float(self.bottom)


@dataclass(frozen=True)
class Last:
    """The newest value, such as a learning rate."""

    now: Number

    def merge(self, other: "Last") -> "Last":
        return other

    def value(self) -> float:
        return float(self.now)


Metric = Mean | Sum | Max | Min | Last


@dataclass
class Meter:
    """The metrics of an iteration by name, in the order in which they were first recorded."""

    metrics: dict[str, Metric] = field(default_factory=dict)

    def record(self, name: str, metric: Metric) -> None:
        """Add a metric to what the name already holds."""
        known = self.metrics.get(name)
        self.metrics[name] = metric if known is None else _merged(known, metric)

    def merge(self, other: "Meter") -> None:
        for name, metric in other.metrics.items():
            self.record(name, metric)

    def settled(self) -> "Meter":
        """Return a copy with plain numbers in place of tensors, to be sent to other processes."""
        return Meter({name: _settled(metric) for name, metric in self.metrics.items()})

    def values(self) -> dict[str, float]:
        return {name: metric.value() for name, metric in self.metrics.items()}


def _merged(known: Metric, metric: Metric) -> Metric:
    """Merge two metrics of one kind; a name never changes its kind."""
    if type(known) is not type(metric):
        raise TypeError(f"a {type(known).__name__} and a {type(metric).__name__} do not add up")
    return known.merge(cast(Any, metric))


def _settled(metric: Metric) -> Metric:
    return replace(metric, **{f.name: float(getattr(metric, f.name)) for f in fields(metric)})


@dataclass(frozen=True)
class Event:
    """Something unusual that happened, for events.jsonl."""

    kind: str
    message: str
    row: int | None = None


def events_of_all(events: Sequence[Event], rows: Rows) -> list[Event]:
    """Return the events of the rows of all processes, in the order of the rows."""
    found = rows.together(events)
    return found if rows is ALL_HERE else sorted(found, key=lambda event: event.row or 0)
