"""Scorers: a reward function applied to the rows of a rollout, and what went wrong for each."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from tether.dist.reduce import gather_results
from tether.dist.share import block
from tether.errors import UserError
from tether.rewards.function import LARGEST_SCORE, Reward, call_reward, describe
from tether.rewards.parts import Part
from tether.rewards.sources import Sources

STARTUP_SECONDS = 60.0


@dataclass(frozen=True)
class Verdict:
    """A row's score, or why there is none. A reward that returns None has no opinion: that is
    no failure of the function, but the row cannot be trained on either."""

    score: float | None
    problem: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # by name, before their weights


@runtime_checkable
class Scorer(Protocol):
    def score(self, rows: list[Mapping[str, Any]]) -> list[Verdict]: ...

    def close(self) -> None: ...


def spread(
    rows: list[Mapping[str, Any]], score: Callable[[list[Mapping[str, Any]]], list[Verdict]]
) -> list[Verdict]:
    """Verdicts in row order; each process scores a block of the rows."""
    mine = block(len(rows))
    parts = gather_results(lambda: score(rows[mine.start : mine.stop]))
    return [verdict for part in parts for verdict in part]


class InProcessScorer:
    """For functions that exist only in this process (notebooks, closures). No time limit."""

    def __init__(self, function: Reward) -> None:
        self.function = function

    def score(self, rows: list[Mapping[str, Any]]) -> list[Verdict]:
        return spread(rows, lambda mine: [self._score_row(row) for row in mine])

    def _score_row(self, row: Mapping[str, Any]) -> Verdict:
        try:
            score = call_reward(self.function, row)
        except (Exception, SystemExit) as error:  # whatever it raises, the row is named
            return Verdict(None, describe(error))
        return Verdict(score, None if score is not None else "the reward returned None")

    def close(self) -> None:
        pass


class ChildScorer:
    """One long-lived child for all parts; when a row hangs it or kills it, a new child goes on
    after that row. It runs the same reward: files that were edited meanwhile stop the run."""

    def __init__(self, parts: Sequence[Part], timeout_seconds: float) -> None:
        self.parts = parts
        self.timeout_seconds = timeout_seconds
        self.child: _Child | None = None
        self.sources = Sources(part.kind for part in parts)

    def score(self, rows: list[Mapping[str, Any]]) -> list[Verdict]:
        return spread(rows, self._score)

    def _score(self, rows: list[Mapping[str, Any]]) -> list[Verdict]:
        lines = [json.dumps(row) for row in rows]
        verdicts: list[Verdict] = []
        while len(verdicts) < len(rows):
            self.child = self.child or self._start()
            self.child.send(lines[len(verdicts) :])
            verdicts += self._collect(len(rows) - len(verdicts))
        return verdicts

    def _start(self) -> "_Child":
        self.sources.refuse_changed()
        return _Child(self.parts)

    def _collect(self, expected: int) -> list[Verdict]:
        """Verdicts until all are there, or up to and with the row that ended the child."""
        verdicts: list[Verdict] = []
        while len(verdicts) < expected and self.child is not None:
            verdicts.append(weigh(self.parts, self._ask_parts()))
        return verdicts

    def _ask_parts(self) -> list[Verdict]:
        """What each part says of the next row, up to one that ended the child."""
        found: list[Verdict] = []
        for _ in self.parts:
            answer = self.child.receive(self.timeout_seconds)
            if isinstance(answer, str):
                self.close()
                return [*found, Verdict(None, answer)]
            problem = answer.get("error")
            if problem is None and answer["score"] is None:
                problem = "the reward returned None"
            found.append(Verdict(answer.get("score"), problem))
        return found

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child = None


def weigh(parts: Sequence[Part], verdicts: Sequence[Verdict]) -> Verdict:
    """The weighted sum of one row's parts. Where a part failed there is no sum, and it is named;
    `verdicts` may end early with such a one."""
    for part, verdict in zip(parts, verdicts, strict=False):
        if verdict.score is None:
            whose = "" if part.name is None else f"part {part.name!r}: "
            return Verdict(None, f"{whose}{verdict.problem}")
    total = sum(p.weight * v.score for p, v in zip(parts, verdicts, strict=True))
    if not abs(total) <= LARGEST_SCORE:
        return Verdict(None, f"the weighted sum of the parts is {total:g}")
    named = {p.name: v.score for p, v in zip(parts, verdicts, strict=True) if p.name is not None}
    return Verdict(total, parts=named)


class _Child:
    def __init__(self, parts: Sequence[Part]) -> None:
        spec = json.dumps([{"kind": p.kind, "arguments": dict(p.arguments)} for p in parts])
        rows_out, rows_in = os.pipe()
        verdicts_out, verdicts_in = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tether.rewards.child", spec, str(rows_out), str(verdicts_in)],
            pass_fds=(rows_out, verdicts_in),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a group of its own, so that what it forks dies with it
        )
        os.close(rows_out)
        os.close(verdicts_in)
        self.rows = os.fdopen(rows_in, "w", encoding="utf-8")
        self.verdicts_fd = verdicts_out
        self.buffer = b""
        answer = self.receive(STARTUP_SECONDS)
        if isinstance(answer, str) or "refused" in answer:
            self.kill()
            raise UserError(answer if isinstance(answer, str) else answer["refused"])

    def send(self, lines: list[str]) -> None:
        """From a thread, as both pipes could fill up and each side wait for the other."""

        def write() -> None:
            # If the child has died meanwhile, `receive` says so.
            with contextlib.suppress(BrokenPipeError, ValueError):
                self.rows.write("".join(f"{line}\n" for line in lines))
                self.rows.flush()

        threading.Thread(target=write, daemon=True).start()

    def receive(self, seconds: float) -> dict[str, Any] | str:
        """The next answer, or a sentence about why there is none."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.verdicts_fd], [], [], left)[0]:
                return f"the reward took longer than {seconds:g} s (reward.timeout_seconds)"
            chunk = os.read(self.verdicts_fd, 1 << 16)
            if not chunk:
                return f"the reward's process ended with code {self.process.wait()}"
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.verdicts_fd)
        with contextlib.suppress(BrokenPipeError):
            self.rows.close()
