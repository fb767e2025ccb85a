"""What the parts of `make yardsticks` share: results kept by their settings, rows of the page."""

import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Words = Mapping[str, str]  # by language: en, zh


class NotThere(Exception):
    """What a part needs cannot be had here; the message says what, and how to get it."""


@dataclass(frozen=True)
class Row:
    """One line of the page: the known figure beside ours."""

    part: str
    task: Words
    known: str
    ours: str
    reached: bool | None  # None = nothing was promised, or nothing measured
    minutes: float = 0.0
    note: Words = field(default_factory=dict)


@dataclass(frozen=True)
class Curve:
    """One line of a panel of the figure."""

    panel: str
    label: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Outcome:
    rows: list[Row]
    curves: list[Curve] = field(default_factory=list)
    # By panel: a known figure and its spread, drawn as a band.
    bands: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class Store:
    """A folder with one JSON file for each measurement, named by a hash of its settings.

    What is there is not measured again, so a stopped `make yardsticks` goes on where it stopped.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str, settings: Mapping[str, Any]) -> Path:
        text = json.dumps(settings, sort_keys=True)
        return self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"

    def measured(
        self,
        name: str,
        settings: Mapping[str, Any],
        measure: Callable[[], dict[str, Any]],
        code: Sequence[str],
    ) -> dict[str, Any]:
        """Return what `measure` gave under these settings, now or earlier, with its seconds.

        `code` are the files that it runs: the commit that is noted is theirs.
        """
        path = self.path(name, settings)
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        print(f"{name} …", flush=True)
        started = time.perf_counter()
        found = measure()
        seconds = time.perf_counter() - started
        result = {"settings": dict(settings), "commit": commit(code), "seconds": seconds, **found}
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(result, indent=1), encoding="utf-8")
        unfinished.replace(path)
        return result


def commit(code: Sequence[str]) -> str:
    """Return the last commit that changed these files, with a + if they differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", *code)
    return (git("log", "-1", "--format=%h", "--", *code) or "no git") + ("+" if changed else "")
