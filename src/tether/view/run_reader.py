"""Read runs from disk, and read on as they grow. Imports no torch."""

import hashlib
import json
import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from tether.config import count_values
from tether.run.directory import (
    CHECKPOINTS,
    CONFIG,
    EVALS,
    EVENTS,
    LATEST,
    METRICS,
    RESPONSES,
    ROLLOUTS,
    SCHEMA,
    TIMINGS,
)
from tether.run.lock import is_being_written
from tether.support.strict_yaml import load_yaml_fast
from tether.view.growing_file import (
    GrowingLines,
    Signature,
    Unreadable,
    bounded_lines,
    last_object,
    open_inside,
    parse_object,
    signature,
)
from tether.view.metric_table import Table
from tether.view.settings import inside
from tether.view.timeline import SamplerLines

NUMBERED_FILE = re.compile(r"^[0-9]{6,9}\.jsonl$")
MAX_CONFIG_BYTES = 1 << 20
MAX_CONFIG_VALUES = 10_000
CACHED_FILES = 8  # of rows, parsed; fewer if they are large
MAX_CACHED_BYTES = 128 << 20  # of them on disk
MAX_ROW_BYTES = 32 << 20  # of a row that is shown: some 100,000 tokens with all their numbers
MAX_ROWS_BYTES = 128 << 20  # of a file; parsed, it takes about five times as much


class Run:
    """One run directory. Every `read_…` looks whether the disk has changed, and reads only that."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.root, self.directory = root, directory
        self.id = directory.name
        self.metrics, self.timings = Table(), Table()
        self.evals: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._lines = {
            name: GrowingLines(root, directory / name) for name in (METRICS, TIMINGS, EVALS, EVENTS)
        }
        self.sampler_lines = SamplerLines(root, directory)
        self._schemas: dict[str, set[Any]] = {name: set() for name in self._lines}
        self._config: tuple[Signature | None, str, dict[str, Any], list[str]] | None = None
        self._twins: tuple[dict[str, Any], str] | None = None
        self._files: OrderedDict[Path, tuple[Signature | None, Rows]] = OrderedDict()
        self._last: dict[str, tuple[Signature, dict[str, Any] | None]] = {}

    @property
    def generation(self) -> int:
        """A number that changes when metrics.jsonl was cut back or replaced."""
        return self._lines[METRICS].generation

    def read_series(self) -> list[str]:
        """Bring `metrics` and `timings` up to date; return what is wrong with the files."""
        for name, attribute in ((METRICS, "metrics"), (TIMINGS, "timings")):
            known, lines = self._lines[name].generation, self._lines[name].fresh()
            if self._lines[name].generation != known:
                setattr(self, attribute, Table())
            table = getattr(self, attribute)
            for record in lines:
                self._schemas[name].add(record.get("schema"))
                table.add(record)
        return self._problems(METRICS) + self._problems(TIMINGS)

    def read_evals(self) -> list[str]:
        return self._extend(EVALS, self.evals)

    def read_events(self) -> list[str]:
        return self._extend(EVENTS, self.events)

    def _extend(self, name: str, records: list[dict[str, Any]]) -> list[str]:
        known, lines = self._lines[name].generation, self._lines[name].fresh()
        if self._lines[name].generation != known:
            records.clear()
        for record in lines:
            self._schemas[name].add(record.get("schema"))
            records.append(record)
        return self._problems(name)

    def _problems(self, name: str) -> list[str]:
        foreign = sorted(str(s) for s in self._schemas[name] if s != SCHEMA)
        other = [_other_version(name, foreign[0])] if foreign else []
        return self._lines[name].problems() + other

    def read_config(self) -> tuple[str, dict[str, Any], list[str]]:
        """Return config.yaml as text and as sections, with what is wrong with it."""
        now = signature(self.directory / CONFIG)
        if self._config is None or self._config[0] != now:
            self._config = now, *_load_config(self.root, self.directory / CONFIG)
        return self._config[1:]

    def config_without_seed(self) -> str:
        """Return a digest that runs share which differ in nothing but seed and directory."""
        _, sections, _ = self.read_config()
        if self._twins is None or self._twins[0] is not sections:
            rest = {name: x for name, x in sections.items() if name not in ("seed", "run")}
            text = json.dumps(rest, sort_keys=True, default=str)
            digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
            self._twins = sections, digest if rest else self.id
        return self._twins[1]

    def planned_iterations(self) -> int | None:
        """Return the iterations of the whole run: those of the config, or, of SFT and reward
        modelling, where they follow from the data, those that the newest checkpoint states."""
        planned = inside(self.read_config()[1], "train", "iterations")
        if planned is None:
            planned = self._newest_state().get("iterations")
        return planned if type(planned) is int else None

    def _newest_state(self) -> dict[str, Any]:
        folder = self.directory / CHECKPOINTS
        try:
            with open_inside(self.root, folder / LATEST) as file:
                name = file.read(64).decode("ascii", "replace").strip()
            if not name.isdecimal():
                return {}
            with open_inside(self.root, folder / name / "state.json") as file:
                state = json.loads(file.read(MAX_CONFIG_BYTES))
        except (Unreadable, ValueError, RecursionError):
            return {}
        return state if isinstance(state, dict) else {}

    def read_last(self, name: str) -> dict[str, Any] | None:
        """Return the last record of a file, without reading those before it."""
        now = signature(self.directory / name)
        if now is None:
            return None
        if name not in self._last or self._last[name][0] != now:
            try:
                self._last[name] = now, last_object(self.root, self.directory / name)
            except Unreadable:
                return None
        return self._last[name][1]

    def rollout_iterations(self) -> list[int]:
        return self._numbered(ROLLOUTS)

    def heldout_iterations(self) -> list[int]:
        """Return after how many iterations held-out responses were kept."""
        return self._numbered(RESPONSES)

    def _numbered(self, folder: str) -> list[int]:
        try:
            with os.scandir(self.directory / folder) as entries:
                names = [entry.name for entry in entries]
        except OSError:
            return []
        return sorted(int(name.split(".")[0]) for name in names if NUMBERED_FILE.match(name))

    def read_rollout(self, iteration: int) -> "Rows":
        """Return the rows of one of `rollout_iterations`."""
        return self._read_rows(self.rollout_path(iteration))

    def read_heldout(self, iteration: int) -> "Rows":
        """Return the responses of one of `heldout_iterations`."""
        return self._read_rows(self.directory / RESPONSES / f"{iteration:06d}.jsonl")

    def rollout_path(self, iteration: int) -> Path:
        return self.directory / ROLLOUTS / f"{iteration:06d}.jsonl"

    def _read_rows(self, path: Path) -> "Rows":
        now = signature(path)
        if path not in self._files or self._files[path][0] != now:
            self._files[path] = now, Rows(self.root, path)
        self._files.move_to_end(path)
        while len(self._files) > 1 and (
            len(self._files) > CACHED_FILES
            or sum(rows.size for _, rows in self._files.values()) > MAX_CACHED_BYTES
        ):
            self._files.popitem(last=False)
        return self._files[path][1]

    def modified(self) -> float:
        times = [signature(self.directory / name) for name in (METRICS, EVALS, CONFIG)]
        return max((s[3] / 1e9 for s in times if s), default=0.0)

    def is_running(self) -> bool:
        return is_being_written(self.directory)


class Rows:
    """One file of rollouts: its rows by number, and what is wrong with it."""

    def __init__(self, root: Path, path: Path) -> None:
        self.by_number: dict[int, dict[str, Any]] = {}
        self.problems: list[str] = []
        self.size = 0  # bytes that were parsed
        try:
            with open_inside(root, path) as file:
                self._read(path.name, file)
        except Unreadable as problem:
            self.problems.append(str(problem))

    def _read(self, name: str, file: BinaryIO) -> None:
        foreign: set[str] = set()
        room = MAX_ROWS_BYTES
        for number, (line, size) in enumerate(bounded_lines(file, MAX_ROW_BYTES), start=1):
            room -= len(line)
            if size > MAX_ROW_BYTES:
                self.problems.append(
                    f"{name}, line {number} has {size:,} bytes; rows above {MAX_ROW_BYTES:,} are "
                    f"not shown."
                )
                continue
            if room < 0:
                self.problems.append(
                    f"{name} is shown up to line {number - 1}: the rest is beyond "
                    f"{MAX_ROWS_BYTES:,} bytes."
                )
                break
            self.size += len(line)
            row = parse_object(line.decode("utf-8", "replace"))
            if row is None:
                self.problems.append(f"{name}, line {number} is not a JSON object.")
                continue
            if row.get("schema") != SCHEMA:
                foreign.add(str(row.get("schema")))
            given = row.get("row")
            self.by_number[given if type(given) is int else number - 1] = row
        self.problems += [_other_version(name, schema) for schema in sorted(foreign)[:1]]


class Folder:
    """The runs directly inside a folder, or the one run that the folder is."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.problems: list[str] = []
        self._runs: dict[str, Run] = {}

    def runs(self) -> dict[str, Run]:
        """Return the runs on disk by id, sorted by name."""
        self.problems = []
        found = [self.path] if _is_run(self.path) else self._inside()
        self._runs = {d.name: self._runs.get(d.name) or Run(self.path, d) for d in found}
        return self._runs

    def _inside(self) -> list[Path]:
        try:
            with os.scandir(self.path) as entries:
                entries = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self.problems.append(f"{self.path.name} cannot be read: {error.strerror}.")
            return []
        found = []
        for entry in entries:
            directory = Path(entry.path)
            if not _is_run(directory):
                continue
            if entry.is_symlink() and not directory.resolve().is_relative_to(self.path):
                self.problems.append(f"{entry.name} is a link that leads out of the folder.")
            else:
                found.append(directory)
        return found


def _is_run(directory: Path) -> bool:
    """Return whether there is a run to show; one that lost its config still has its numbers."""
    try:
        return (directory / CONFIG).is_file() or (directory / METRICS).is_file()
    except OSError:
        return False


def _load_config(root: Path, path: Path) -> tuple[str, dict[str, Any], list[str]]:
    try:
        with open_inside(root, path) as file:
            text = file.read(MAX_CONFIG_BYTES).decode("utf-8", "replace")
    except Unreadable as problem:
        return "", {}, [str(problem)]
    sections: Any = None
    try:
        sections = load_yaml_fast(text)
        too_many = count_values(sections, MAX_CONFIG_VALUES) >= MAX_CONFIG_VALUES
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        why = f"{path.name}{where} is not YAML ({error.problem}), so the settings are unknown."
        return text, {}, [why]
    except (yaml.YAMLError, ValueError):
        return text, {}, [f"{path.name} is not YAML, so the settings are unknown."]
    except RecursionError:  # deeper than Python goes, or a list inside itself
        too_many = True
    if too_many:
        return text, {}, [f"{path.name} holds too many values to show."]
    if not isinstance(sections, dict):
        return text, {}, [f"{path.name} holds no sections, so the settings are unknown."]
    schema = sections.get("schema")
    return text, sections, [] if schema == SCHEMA else [_other_version(path.name, str(schema))]


def _other_version(name: str, schema: str) -> str:
    return f"{name} says schema {schema}, this tether reads {SCHEMA}: what it knows is shown."
