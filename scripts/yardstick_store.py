"""What the parts of `make yardsticks` share: results kept by their settings, rows of the page."""

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import machine

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "results"  # committed: another machine goes on where this one stopped
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
    reached: bool | None  # None = nothing is known to compare with, or nothing measured
    minutes: float = 0.0  # of processor time
    note: Words = field(default_factory=dict)
    promised: bool = True  # False = reported as found: not reaching it is no failure
    in_readme: bool = True


def row_of_signs(
    part: str, task: Words, known: str, signs: Mapping[str, bool], minutes: float
) -> Row:
    """Return the line of a part that reports which signs of a paper were found."""

    def said(yes: str, no: str) -> str:
        return "; ".join(f"{sign}: {yes if held else no}" for sign, held in signs.items())

    return Row(
        part=part,
        task=task,
        known=known,
        ours=f"{sum(signs.values())} of {len(signs)} signs",
        reached=all(signs.values()),
        minutes=minutes,
        note={"en": said("yes", "no"), "zh": said("是", "否")},
        promised=False,
    )


@dataclass(frozen=True)
class Curve:
    """One line of a panel of the figure."""

    panel: str
    label: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Details:
    """A table of a part's own, for its section of the page; the cells are the same everywhere."""

    head: Mapping[str, list[str]]  # by language
    rows: list[list[str]]


@dataclass(frozen=True)
class Outcome:
    rows: list[Row]
    curves: list[Curve] = field(default_factory=list)
    details: Details | None = None
    # By panel: a known figure and its spread, drawn as a band.
    bands: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class Store:
    """A folder with one JSON file for each measurement, named by a hash of its settings.

    What is there is not measured again, so a stopped `make yardsticks` goes on where it stopped.
    `work` is for runs and data, which are not kept. With `only_kept` nothing is measured: what is
    not there is missing.
    """

    def __init__(self, folder: Path, work: Path | None = None, only_kept: bool = False) -> None:
        self.folder, self.work, self.only_kept = folder, work or folder, only_kept
        self.machines: dict[str, None] = {}  # of all results that were asked for, in their order

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

        `code` are the files that it runs: the commit that is noted is theirs. Processor seconds
        are this process's and those of its children that have ended.
        """
        path = self.path(name, settings)
        if path.is_file():
            return self._noted(read_result(path))
        if self.only_kept:
            part = name.partition("-")[0]
            raise NotThere(f"not measured yet: `make yardsticks YARDSTICKS='--only {part}'`")
        print(f"{name} …", flush=True)
        noted = commit(code)  # before: files may change meanwhile
        started, used = time.perf_counter(), processor_seconds()
        found = measure()
        result = {
            "settings": dict(settings),
            "commit": noted,
            "machine": machine(),
            "seconds": round(time.perf_counter() - started, 1),
            "processor_seconds": round(processor_seconds() - used, 1),
            **found,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(result) + "\n", encoding="utf-8")
        unfinished.replace(path)
        return self._noted(result)

    def _noted(self, result: dict[str, Any]) -> dict[str, Any]:
        self.machines[result["machine"]] = None
        return result


def read_result(path: Path) -> dict[str, Any]:
    """Return a kept result; one that is not whole is refused by its name."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if {"settings", "machine", "processor_seconds"} <= result.keys():
            return result
    except (ValueError, AttributeError):
        pass
    raise SystemExit(f"{path} is not a whole result; remove it, and it is measured again.")


def processor_seconds() -> float:
    """Return the seconds that this process and its ended children have computed."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def minutes(results: Iterable[Mapping[str, Any]]) -> float:
    """Return the processor minutes of several measurements."""
    return sum(result["processor_seconds"] for result in results) / 60


def commit(code: Sequence[str]) -> str:
    """Return the last commit that changed these files, with a + if they differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", *code)
    return (git("log", "-1", "--format=%h", "--", *code) or "no git") + ("+" if changed else "")
