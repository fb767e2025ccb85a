"""Writing a run: one JSON object a line, flushed every iteration, readable meanwhile."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tether.run.directory import CONFIG, EVALS, EVENTS, METRICS, ROLLOUTS, SCHEMA, TIMINGS
from tether.run.events import Event


class RunWriter:
    """The files of one run but its checkpoints."""

    def __init__(self, directory: Path, config_yaml: str) -> None:
        self.directory = directory
        (directory / ROLLOUTS).mkdir()
        (directory / CONFIG).write_text(config_yaml, encoding="utf-8")
        self.files = {
            name: (directory / name).open("a", encoding="utf-8")
            for name in (METRICS, TIMINGS, EVALS, EVENTS)
        }

    def iteration(
        self, iteration: int, metrics: Mapping[str, float], timings: Mapping[str, float]
    ) -> None:
        self._append(METRICS, {"iteration": iteration, **metrics})
        self._append(TIMINGS, {"iteration": iteration, **timings})

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._append(EVALS, record)

    def events(self, iteration: int, events: Sequence[Event]) -> None:
        for event in events:
            record = {"iteration": iteration, "kind": event.kind, "row": event.row}
            self._append(EVENTS, {**record, "message": event.message, "attempt": 1})

    def rollouts(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Whole or not at all: a reader never sees half a file."""
        path = self.directory / ROLLOUTS / f"{iteration:06d}.jsonl"
        staged = path.with_suffix(".tmp")
        staged.write_text("".join(_line(row) for row in rows), encoding="utf-8")
        os.replace(staged, path)

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        self.files[name].write(_line(record))
        self.files[name].flush()


def shortest_floats(x: Tensor) -> list[float]:
    """float32 values as the shortest decimals that read back to the same float32."""
    return [float(str(value)) for value in x.float().cpu().numpy()]


def _line(record: Mapping[str, Any]) -> str:
    """Strict JSON: a number that is not finite becomes null; what is no text is escaped."""
    finite = {key: _finite(value) for key, value in record.items()}
    line = json.dumps({"schema": SCHEMA, **finite}, ensure_ascii=False, allow_nan=False)
    return line.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
