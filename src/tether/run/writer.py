"""Writing a run: one JSON object per line, written through at once, readable meanwhile."""

import contextlib
import errno
import json
import math
import os
import re
import signal
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from torch import Tensor

from tether.errors import RunStopped, UserError, one_line
from tether.run.checkpoint_store import sync
from tether.run.directory import (
    CONFIG,
    EVALS,
    EVENTS,
    METRICS,
    PROMPTS,
    RESPONSES,
    ROLLOUTS,
    SAMPLERS,
    SCHEMA,
    TIMINGS,
)
from tether.run.metrics import Event
from tether.run.reader import NotRegular, open_regular

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
MAX_COLUMN_CHARACTERS = 4000  # of a data column beside a response
ROLLOUT_FILE = re.compile(r"([0-9]{6,})\.(jsonl|tmp)")  # anything else belongs to another program


class RunWriter:
    """Writes the files of one run except its checkpoints. `attempt` counts how often it was
    started. A disk that is full stops the run, with all whole lines in place."""

    def __init__(self, directory: Path, config_yaml: str, attempt: int = 1) -> None:
        self.directory = directory
        self.attempt = attempt
        try:
            (directory / ROLLOUTS).mkdir(exist_ok=True)
        except OSError as error:
            raise self._cannot_write(directory / ROLLOUTS, error) from None
        self._replace(directory / CONFIG, config_yaml)
        self.files = {name: self._open(name) for name in (METRICS, TIMINGS, EVALS, EVENTS)}

    def _open(self, name: str) -> FileIO:
        path = self.directory / name
        try:
            if path.exists() and not path.is_file():  # a FIFO would be waited for
                raise UserError(f"{path} is not a regular file; remove it.")
            return path.open("ab", buffering=0)
        except OSError as error:
            raise self._cannot_write(path, error) from None

    def prompts(
        self,
        iteration: int,
        sha256: str,
        window: tuple[int, int] | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Write the digest of the prompts' token ids, which a resume compares; `window` or `rows`
        says which they are, where the iteration does not."""
        if PROMPTS not in self.files:
            self.files[PROMPTS] = self._open(PROMPTS)
        where = {} if window is None else {"window": list(window)}
        if rows is not None:
            where = {"rows": list(rows)}
        self._append(PROMPTS, {"iteration": iteration, "sha256": sha256, **where})

    def iteration(
        self, iteration: int, metrics: Mapping[str, float], timings: Mapping[str, float]
    ) -> None:
        self._append(METRICS, {"iteration": iteration, **metrics})
        self._append(TIMINGS, {"iteration": iteration, **timings})

    def samplers(self, iteration: int, record: Mapping[str, Any]) -> None:
        """Write what samplers apart from training did in an iteration."""
        if SAMPLERS not in self.files:
            self.files[SAMPLERS] = self._open(SAMPLERS)
        self._append(SAMPLERS, {"iteration": iteration, **record})

    def evaluation(
        self, record: Mapping[str, Any], responses: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Append a line about an evaluation, once its responses are in a file."""
        if responses:
            path = self.directory / RESPONSES / f"{record['iteration']:06d}.jsonl"
            try:
                path.parent.mkdir(exist_ok=True)
            except OSError as error:
                raise self._cannot_write(path.parent, error) from None
            self._replace(path, "".join(_line(row) for row in responses))
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
            for folder in (ROLLOUTS, RESPONSES):
                if (self.directory / folder).is_dir():
                    sync(self.directory / folder)
            sync(self.directory)
        except OSError as error:
            raise self._cannot_write(self.directory, error) from None

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append the whole line, or none of it."""
        file, line = self.files[name], _line(record).encode("utf-8")
        before = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, "no room for a whole line")
        except OSError as error:
            os.ftruncate(file.fileno(), before)
            raise self._cannot_write(self.directory / name, error) from None

    def _replace(self, path: Path, text: str) -> None:
        try:
            replace_file(path, text)
        except OSError as error:
            raise self._cannot_write(path, error) from None

    def _cannot_write(self, path: Path, error: OSError) -> RunStopped:
        first = "Make room" if error.errno in (*NO_ROOM, errno.EFBIG) else "Mend that"
        return RunStopped(
            f"{path} could not be written: {one_line(error).lower()}. {first}, then `tether resume "
            f"{self.directory}` goes on."
        )


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all: a reader never sees half of it, also after a kill."""
    staged = path.with_suffix(".tmp")
    try:
        staged.write_text(text, encoding="utf-8")
        sync(staged)
        os.replace(staged, path)
    except OSError:
        staged.unlink(missing_ok=True)
        raise


class NoWriter:
    """Writes nothing, for the processes beside rank 0."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def prompts(
        self,
        iteration: int,
        sha256: str,
        window: tuple[int, int] | None = None,
        rows: Sequence[int] | None = None,
    ) -> None: ...

    def iteration(
        self, iteration: int, metrics: Mapping[str, float], timings: Mapping[str, float]
    ) -> None: ...

    def samplers(self, iteration: int, record: Mapping[str, Any]) -> None: ...

    def evaluation(
        self, record: Mapping[str, Any], responses: Sequence[Mapping[str, Any]] = ()
    ) -> None: ...

    def events(self, iteration: int, events: Sequence[Event]) -> None: ...

    def rollouts(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


def note_end(writer: RunWriter | NoWriter, iterations_done: int, error: Exception) -> None:
    """Write why a run ended before its time: `stopped` by itself, or `failed`."""
    stopped = isinstance(error, RunStopped | UserError)
    message = str(error) if stopped else f"{type(error).__name__}: {one_line(error)}"
    with contextlib.suppress(RunStopped):  # the disk may be what stopped it
        writer.events(iterations_done, [Event("stopped" if stopped else "failed", message)])


def note_interrupt(
    writer: RunWriter | NoWriter, iterations_done: int, number: signal.Signals
) -> None:
    message = f"{number.name} after {iterations_done} iterations; all saved"
    writer.events(iterations_done, [Event("interrupted", message)])


def note_stop(writer: RunWriter | NoWriter, iterations_done: int, iterations: int) -> None:
    message = f"by its caller after {iterations_done} of {iterations} iterations; all saved"
    writer.events(iterations_done, [Event("interrupted", message)])


def cut_back(run: Path, iterations_done: int) -> None:
    """Cut the run's files back to what they were after so many iterations: later lines and rollouts
    go, and so does what a kill left half written. Events stay: they did happen.

    All files are read first: where one is damaged, none is cut.
    """
    ends = {
        METRICS: iterations_done,
        TIMINGS: iterations_done,
        SAMPLERS: iterations_done,
        PROMPTS: iterations_done,
        EVALS: iterations_done + 1,  # made with the weights after that many iterations
        EVENTS: None,
    }
    kept = {name: _whole_bytes(run / name, end) for name, end in ends.items()}
    for name, size in kept.items():
        if size is not None:
            os.truncate(run / name, size)
    for folder, end in ((ROLLOUTS, iterations_done), (RESPONSES, iterations_done + 1)):
        for path in (run / folder).glob("*"):
            named = ROLLOUT_FILE.fullmatch(path.name)
            if named and (path.suffix == ".tmp" or int(named[1]) >= end):
                path.unlink()


def _whole_bytes(path: Path, before: int | None) -> int | None:
    """Count the bytes of the whole lines at the top whose iteration comes before that one; None
    where there is no file."""
    try:
        with open_regular(path) as file:
            lines = file.readlines()
    except FileNotFoundError:
        return None
    except (OSError, NotRegular) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}.") from None
    kept = 0
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        if before is not None and _iteration(path, number, line) >= before:
            break
        kept += len(line)
    return kept


def _iteration(path: Path, number: int, line: bytes) -> int:
    try:
        iteration = json.loads(line)["iteration"]
    except (ValueError, KeyError, TypeError):
        iteration = None
    if type(iteration) is not int:
        raise UserError(
            f"{path}, line {number} is damaged: it is not a JSON object with an iteration. Repair "
            f"the line, or remove it; nothing was cut."
        )
    return iteration


def shortest_floats(x: Tensor) -> list[float]:
    """Return float32 values as the shortest decimals that read back to the same float32."""
    return [float(str(value)) for value in x.float().cpu().numpy()]


def shown_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other columns of a data row, short and in JSON's types, for a run's files.

    What JSON does not know becomes text, and a value above MAX_COLUMN_CHARACTERS is cut.
    """
    return {str(name): _shown_value(value) for name, value in columns.items()}


def _shown_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        value = text = str(value)
    cut = len(text) > MAX_COLUMN_CHARACTERS
    return f"{text[:MAX_COLUMN_CHARACTERS]}…" if cut else value


def _line(record: Mapping[str, Any]) -> str:
    """Return a line of strict JSON: a number that is not finite becomes null; bytes that are not
    text are escaped."""
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
