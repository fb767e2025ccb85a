"""Writing a run: one JSON object a line, on its way to the disk at once, readable meanwhile."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tether.errors import RunStopped
from tether.run.checkpoints import sync
from tether.run.directory import CONFIG, EVALS, EVENTS, METRICS, ROLLOUTS, SCHEMA, TIMINGS
from tether.run.events import Event


class RunWriter:
    """The files of one run but its checkpoints. `attempt` counts how often it was started."""

    def __init__(self, directory: Path, config_yaml: str, attempt: int = 1) -> None:
        self.directory = directory
        self.attempt = attempt
        (directory / ROLLOUTS).mkdir(exist_ok=True)
        self._replace(directory / CONFIG, config_yaml)
        self.files = {
            name: (directory / name).open("ab", buffering=0)
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
            self._append(EVENTS, {**record, "message": event.message, "attempt": self.attempt})

    def rollouts(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None:
        path = self.directory / ROLLOUTS / f"{iteration:06d}.jsonl"
        self._replace(path, "".join(_line(row) for row in rows))

    def sync(self) -> None:
        """Wait until all lines are on the disk: a checkpoint must not outlive them."""
        try:
            for file in self.files.values():
                os.fsync(file.fileno())
            sync(self.directory / ROLLOUTS)
            sync(self.directory)
        except OSError as error:
            raise self._cannot_write(self.directory, error) from None

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        """The whole line, or none of it."""
        file, line = self.files[name], _line(record).encode("utf-8")
        before = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) < len(line):
                raise OSError(None, "no room for a whole line")
        except OSError as error:
            os.ftruncate(file.fileno(), before)
            raise self._cannot_write(self.directory / name, error) from None

    def _replace(self, path: Path, text: str) -> None:
        """Whole or not at all: a reader never sees half a file."""
        staged = path.with_suffix(".tmp")
        try:
            staged.write_text(text, encoding="utf-8")
            sync(staged)
            os.replace(staged, path)
        except OSError as error:
            staged.unlink(missing_ok=True)
            raise self._cannot_write(path, error) from None

    def _cannot_write(self, path: Path, error: OSError) -> RunStopped:
        reason = (error.strerror or str(error)).lower()
        return RunStopped(
            f"{path} could not be written: {reason}. Make room, then `tether resume "
            f"{self.directory}` goes on."
        )


class NoWriter:
    """For a process beside the one that writes the run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def iteration(
        self, iteration: int, metrics: Mapping[str, float], timings: Mapping[str, float]
    ) -> None: ...

    def evaluation(self, record: Mapping[str, Any]) -> None: ...

    def events(self, iteration: int, events: Sequence[Event]) -> None: ...

    def rollouts(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


def cut_back(run: Path, iterations_done: int) -> None:
    """Make the run's files what they were after so many iterations: later lines and rollouts go,
    and so does what a kill left half written. Events stay: they did happen."""
    _cut(run / METRICS, iterations_done)
    _cut(run / TIMINGS, iterations_done)
    _cut(run / EVALS, iterations_done + 1)  # made with the weights after that many iterations
    _cut(run / EVENTS, None)
    for path in (run / ROLLOUTS).glob("*"):
        if path.suffix == ".tmp" or int(path.stem) >= iterations_done:
            path.unlink()


def _cut(path: Path, before: int | None) -> None:
    """Keep the whole lines at the top whose iteration comes before that one."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as file:
        for line in file:
            whole = line.endswith(b"\n")
            if not whole or (before is not None and json.loads(line)["iteration"] >= before):
                break
            kept += len(line)
    os.truncate(path, kept)


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
