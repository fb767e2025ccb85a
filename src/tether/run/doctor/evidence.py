"""What the rules judge by: a run's numbers, evaluations, events, settings and newest rows.

Read without failing: what is missing or damaged is said in `notes`, and the rest is used. Imports
no torch. The page makes an `Evidence` of what it has read already.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from tether.errors import UserError, one_line
from tether.run.directory import (
    CONFIG,
    EVALS,
    EVENTS,
    METRICS,
    ROLLOUTS,
    SCHEMA,
    is_pipeline,
)
from tether.run.reader import NotRegular, read_regular
from tether.support.strict_yaml import load_yaml_fast

Record = Mapping[str, Any]
MAX_ROLLOUT_BYTES = 64 << 20  # of one file; a larger one is not read
SHOWN_DAMAGE = 3  # damaged lines that are named one by one


@dataclass(frozen=True)
class Point:
    """One number of a run, and the iteration that it is of."""

    iteration: int
    value: float


@dataclass(frozen=True)
class Evidence:
    """A run, as far as it can be read."""

    metrics: Sequence[Record]
    evals: Sequence[Record] = ()
    events: Sequence[Record] = ()
    config: Record = field(default_factory=dict)
    rows: Mapping[int, Sequence[Record]] = field(default_factory=dict)  # of rollouts/, by iteration
    notes: Sequence[str] = ()  # what is missing or damaged, a sentence each

    @property
    def iterations(self) -> int:
        return len(self.metrics)

    def series(self, name: str) -> list[Point]:
        """Return a metric by iteration, without what is missing or not finite."""
        return self._all_series.get(name, [])

    def metric_names(self) -> list[str]:
        """Return the metrics that have a number somewhere, in the order of the file."""
        return [name for name in self._all_series if name not in ("iteration", "schema")]

    @cached_property
    def _all_series(self) -> dict[str, list[Point]]:
        found: dict[str, list[Point]] = {}
        for record in self.metrics:
            iteration = record.get("iteration")
            if type(iteration) is not int:
                continue
            for name, value in record.items():
                if is_number(value):
                    found.setdefault(name, []).append(Point(iteration, float(value)))
        return found

    def setting(self, dotted: str) -> Any:
        """Return a field of the config; None where the run does not say."""
        value: Any = self.config
        for name in dotted.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def number(self, dotted: str) -> float | None:
        value = self.setting(dotted)
        return float(value) if is_number(value) else None

    def first_and_last_rows(self) -> tuple[Sequence[Record], Sequence[Record]]:
        """Return the rows of the first and of the last iteration that were kept."""
        if not self.rows:
            return (), ()
        return self.rows[min(self.rows)], self.rows[max(self.rows)]

    def events_of(self, kind: str) -> list[Record]:
        """Return the events whose kind begins so."""
        return [event for event in self.events if str(event.get("kind")).startswith(kind)]


def is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)


def start(points: Sequence[Point]) -> float:
    """Return the median of the first quarter, at least three numbers."""
    return statistics.median(p.value for p in points[: max(3, len(points) // 4)])


def end(points: Sequence[Point]) -> float:
    """Return the median of the last quarter, at least three numbers."""
    return statistics.median(p.value for p in last_quarter(points))


def last_quarter(points: Sequence[Point]) -> Sequence[Point]:
    return points[-max(3, len(points) // 4) :]


def read_evidence(run: Path) -> Evidence:
    """Read a run directory, also while it is being written."""
    if is_pipeline(run):
        raise UserError(f"{run} is a run of three stages; name the one of PPO: {run / 'ppo'}.")
    if not (run / METRICS).is_file() and not (run / CONFIG).is_file():
        raise UserError(f"{run} is not a run: there is no {CONFIG} in it.")
    notes: list[str] = []
    config = _read_config(run / CONFIG, notes)
    return Evidence(
        metrics=list(_read_lines(run / METRICS, notes)),
        evals=list(_read_lines(run / EVALS, notes)),
        events=list(_read_lines(run / EVENTS, notes)),
        config=config,
        rows=_read_rows(run / ROLLOUTS, notes),
        notes=notes,
    )


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        config = load_yaml_fast(read_regular(path).decode("utf-8", "replace"))
    except (OSError, NotRegular, yaml.YAMLError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({one_line(error)}): settings are not judged.")
        return {}
    if not isinstance(config, dict):
        notes.append(f"{path.name} holds no sections: settings are not judged.")
        return {}
    if config.get("schema") != SCHEMA:
        notes.append(_other_version(path.name, config.get("schema")))
    if config.get("stage") is not None:
        notes.append(f"This is a run of {config['stage']}; the rules are about PPO.")
    return config


def _read_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    try:
        content = read_regular(path)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
        return
    except (OSError, NotRegular) as error:
        notes.append(f"{path.name} cannot be read: {one_line(error)}.")
        return
    damaged, foreign = [], set()
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):  # the rest is half written
        record = parse(line)
        if record is None:
            damaged.append(number)
            continue
        if record.get("schema") != SCHEMA:
            foreign.add(str(record.get("schema")))
        yield record
    if damaged:
        which = ", ".join(map(str, damaged[:SHOWN_DAMAGE]))
        more = " and others" if len(damaged) > SHOWN_DAMAGE else ""
        notes.append(f"{path.name}, line {which}{more}: not a JSON object, left out.")
    if foreign:
        notes.append(_other_version(path.name, min(foreign)))


def _read_rows(folder: Path, notes: list[str]) -> dict[int, list[dict[str, Any]]]:
    """Read the first and the last file of rows: how responses changed shows between them."""
    files = sorted(path for path in folder.glob("*.jsonl") if path.stem.isdecimal())
    if not files:
        notes.append(f"{folder.name}/ holds no rows, so responses are not judged.")
    rows = {}
    for path in dict.fromkeys([*files[:1], *files[-1:]]):
        if path.stat().st_size > MAX_ROLLOUT_BYTES:
            notes.append(f"{folder.name}/{path.name} is too large to be judged.")
            continue
        rows[int(path.stem)] = list(_read_lines(path, notes))
    return rows


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it is not one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _other_version(name: str, schema: Any) -> str:
    return f"{name} says schema {schema}, this tether reads {SCHEMA}: what it knows is judged."
