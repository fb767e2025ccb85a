"""An iteration as a timeline: who sampled which rows with which weights, what the trainer did
meanwhile, and how many chunks waited. Seconds are from the iteration's start.

With samplers apart the spans are those of samplers.jsonl, of which only the lines of an iteration
and of the few after it are read. Without them there is one lane, from timings.jsonl.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tether.run.directory import SAMPLERS
from tether.view.growing_file import (
    ANCHOR_BYTES,
    Signature,
    Unreadable,
    bounded_lines,
    open_inside,
    parse_object,
    signature,
)
from tether.view.metric_table import Table, as_number

Body = dict[str, Any]
STAGES = ("rollout", "reward", "forward", "update")
MAX_LINE_BYTES = 4 << 20  # of an iteration with some 20,000 chunks
MAX_SPANS = 4000
LOOK_AHEAD = 4  # iterations after it in which a chunk that was begun in it may have ended
ITERATION = re.compile(rb'"iteration": ?([0-9]{1,12})[,}]')
HEAD_BYTES = 200  # in which a line says its iteration


class SamplerLines:
    """Where the line of each iteration is in a growing samplers.jsonl. Only heads are parsed."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.root, self.path = root, directory / SAMPLERS
        self._seen: Signature | None = None
        self._forget()

    def _forget(self) -> None:
        self.places: dict[int, tuple[int, int]] = {}  # by iteration: offset and size
        self.problems: list[str] = []
        self._end, self._anchor = 0, b""

    def refresh(self) -> None:
        """Find the lines that were written since the last call; all of them if it was cut back."""
        now = signature(self.path)
        if now is None or now == self._seen:
            if now is None:
                self._forget()
            self._seen = now
            return
        try:
            with open_inside(self.root, self.path) as file:
                file.seek(self._end - len(self._anchor))
                moved = self._seen is not None and now[:2] != self._seen[:2]
                if moved or file.read(len(self._anchor)) != self._anchor:
                    self._forget()
                    file.seek(0)
                self._find(file)
        except Unreadable as problem:
            self._forget()
            self.problems.append(str(problem))
        self._seen = now

    def _find(self, file: Any) -> None:
        whole = os.fstat(file.fileno()).st_size
        for line, size in bounded_lines(file, MAX_LINE_BYTES):
            if self._end + size + 1 > whole:
                break  # half a line, which is still being written
            found = ITERATION.search(line[:HEAD_BYTES])
            if found is not None:
                self.places[int(found[1])] = self._end, size
            elif size > MAX_LINE_BYTES:
                self.problems.append(f"{SAMPLERS} has a line of {size:,} bytes, which is left out.")
            else:
                self.problems.append(f"{SAMPLERS} has a line that names no iteration.")
            self._end += size + 1
        self.problems = self.problems[:3]
        file.seek(max(0, self._end - ANCHOR_BYTES))
        self._anchor = file.read(min(self._end, ANCHOR_BYTES))

    def read(self, iteration: int) -> dict[str, Any] | None:
        """Return the line of an iteration; None if there is none that can be read."""
        if iteration not in self.places:
            return None
        offset, size = self.places[iteration]
        try:
            with open_inside(self.root, self.path) as file:
                file.seek(offset)
                return parse_object(file.read(size).decode("utf-8", "replace"))
        except Unreadable:
            return None


def timeline_iterations(lines: SamplerLines, timings: Table) -> list[int]:
    """Return the iterations that have a timeline, in order."""
    lines.refresh()
    return sorted({*lines.places, *(n for n in timings.row_of if type(n) is int and n >= 0)})


def draw_timeline(iteration: int, lines: SamplerLines, timings: Table) -> Body | None:
    """Return the lanes of one of `timeline_iterations`; None if nothing is known of it."""
    line = lines.read(iteration)
    stages = _stages(line) if line is not None else _stages_of(timings, iteration)
    if not stages:
        return None
    began, work = 0.0, list[Body]()
    for name, seconds in stages.items():
        work.append({"stage": name, "from": began, "to": began + seconds})
        began += seconds
    busy = max(began, _seconds(line or {}, "seconds"))
    following = list(_following(iteration, busy, lines)) if line is not None else []
    end = following[0][1] if following else busy  # evaluation and checkpoint are in between
    chunks = list(_chunks([(line, 0.0), *following], end)) if line is not None else []
    lanes = _sampler_lanes(chunks, end)
    if end > busy:
        work.append({"stage": "between", "from": busy, "to": end})
    rewards = [span for span in work if span["stage"] == "reward"]
    others = [span for span in work if span["stage"] != "reward"]
    # One process does both, so only its own share is one.
    working = [span for span in work if span["stage"] != "rollout"]
    idle = None if line is None else _idle(working, end)
    lanes += [
        {"kind": "rewards", "name": "", "spans": rewards, "idle": None},
        {"kind": "trainer", "name": "", "spans": others, "idle": idle},
    ]
    return {
        "iteration": iteration,
        "apart": line is not None,
        "seconds": end,
        "lanes": lanes,
        "queue": _queue(chunks, end),
        "staleness": _staleness(chunks),
    }


def _following(
    iteration: int, busy: float, lines: SamplerLines
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the next lines with the second at which their iterations began, as far as one process
    wrote them without a break."""
    at = busy
    for later in range(iteration + 1, iteration + 1 + LOOK_AHEAD):
        line = lines.read(later)
        before = as_number(line.get("before")) if line is not None else math.nan
        if line is None or not 0 <= before < math.inf:
            return
        at += before
        yield line, at
        at += max(sum(_stages(line).values()), _seconds(line, "seconds"))


def _chunks(lines: list[tuple[Mapping[str, Any], float]], end: float) -> Iterator[Body]:
    """Yield the chunks that were asked for before the end and ended after the beginning."""
    left = MAX_SPANS
    for line, at in lines:
        listed = line.get("chunks")
        for chunk in listed if isinstance(listed, list) else []:
            span = _chunk(chunk, at)
            if span is not None and span["to"] > 0 and span["asked"] < end and left > 0:
                left -= 1
                yield span


def _chunk(chunk: Any, at: float) -> Body | None:
    """Return one chunk; None for what is not whole."""
    if not isinstance(chunk, dict):
        return None
    names = ("asked", "began", "ended")
    asked, began, ended = (round(as_number(chunk.get(name)) + at, 4) for name in names)
    rows, named = chunk.get("rows"), chunk.get("sampler")
    whole = math.isfinite(asked + began + ended) and asked <= began <= ended
    if not whole or not isinstance(named, str):
        return None
    purpose = str(chunk.get("purpose"))
    ordered = isinstance(rows, list) and len(rows) == 2 and all(type(row) is int for row in rows)
    return {
        "sampler": named[:80],
        "asked": asked,
        "from": began,
        "to": ended,
        "rows": rows if ordered else None,
        **{name: _whole(chunk.get(name)) for name in ("iteration", "version", "lost")},
        "trains": purpose == "token" or purpose.startswith("token "),  # else it evaluates
    }


def _sampler_lanes(chunks: list[Body], end: float) -> list[Body]:
    by_name: dict[str, list[Body]] = {}
    for chunk in chunks:
        if chunk["from"] < end:
            by_name.setdefault(chunk["sampler"], []).append(chunk)
    return [
        {
            "kind": "sampler",
            "name": name,
            "spans": sorted(by_name[name], key=lambda chunk: chunk["from"]),
            "idle": _idle(by_name[name], end),
        }
        for name in sorted(by_name, key=_natural)
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key by which `sampler 2` stands before `sampler 10`."""
    parts = re.split(r"([0-9]{1,9})", name)
    return [(int(part), "") if part.isascii() and part.isdigit() else (0, part) for part in parts]


def _idle(spans: list[Body], end: float) -> float | None:
    """Return the share of the time in which nothing was done."""
    busy = sum(max(0.0, min(span["to"], end) - max(span["from"], 0.0)) for span in spans)
    return max(0.0, 1 - busy / end) if end > 0 else None


def _queue(chunks: list[Body], end: float) -> list[tuple[float, int]]:
    """Return how many chunks waited for a sampler, as steps: (second, number from then on)."""
    moves = [(max(0.0, chunk["asked"]), 1) for chunk in chunks]
    moves += [(max(0.0, chunk["from"]), -1) for chunk in chunks]
    steps: dict[float, int] = {0.0: 0}
    waiting = 0
    for second, change in sorted(moves):
        waiting += change
        if second < end:
            steps[second] = waiting
    return list(steps.items())


def _staleness(chunks: list[Body]) -> list[tuple[int, int]]:
    """Return how old the weights are that drew rows for training, counted in iterations up to the
    one that learns from them: (iterations, rows)."""
    rows: dict[int, int] = {}
    for chunk in chunks:
        for_iteration, version, between = chunk["iteration"], chunk["version"], chunk["rows"]
        if chunk["trains"] and None not in (for_iteration, version, between):
            old = for_iteration - version
            rows[old] = rows.get(old, 0) + between[1] - between[0]
    return sorted(rows.items())


def _stages(line: Mapping[str, Any]) -> dict[str, float]:
    stages = line.get("stages")
    found = stages if isinstance(stages, dict) else {}
    return {name: _seconds(found, name) for name in STAGES if name in found}


def _stages_of(timings: Table, iteration: int) -> dict[str, float]:
    row = timings.row_of.get(iteration)
    seconds = {name: timings.at(f"time/{name}", row) for name in STAGES}
    return {name: x for name, x in seconds.items() if 0 <= x < math.inf}


def _seconds(record: Mapping[str, Any], name: str) -> float:
    found = as_number(record.get(name))
    return found if 0 <= found < math.inf else 0.0


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None
