"""Call tools and environments in threads, many at once, each with a time limit.

A thread cannot be killed. One that exceeds its limit is abandoned: its call has failed, even if it
returns later, and it counts as stuck until it ends. Threads are daemons, so that a hanging one does
not keep the program from ending.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tether.errors import describe

MAX_PARALLEL_CALLS = 16
MAX_STUCK = 64  # abandoned threads that still hang; with more, nothing is called


Fault = Literal["policy", "tool"]


class InvalidArguments(Exception):
    """Raised by a tool that cannot use its arguments; the policy reads the sentence."""


class WrongResult(Exception):
    """Raised where a tool or environment returned what cannot be used; the sentence says what."""


class ToolError(Exception):
    """Raised where the policy is to read a text of the tool's own about a call that failed."""

    def __init__(self, shown: str, error: str, fault: Fault) -> None:
        super().__init__(error)
        self.shown = shown
        self.fault: Fault = fault


@dataclass(frozen=True)
class ToolRequest:
    """A call that is to be made."""

    name: str
    arguments: str
    run: Callable[[str], object]
    timeout_seconds: float
    reply: str  # the observation, with {} for what the call returns


@dataclass(frozen=True)
class ToolResult:
    """What a call returned, or an error and whose fault it is."""

    value: object
    seconds: float
    error: str | None = None
    fault: Fault | None = None
    abandoned: bool = False  # its thread may still run
    shown: str | None = None  # what the policy reads of the error, if not a sentence of tether's


def attempt(call: Callable[[], object]) -> ToolResult:
    """Make a call here and now; return what it gave, or what went wrong and whose fault it is."""
    began = time.perf_counter()
    value: object = None
    error: str | None = None
    fault: Fault | None = None
    shown: str | None = None
    try:
        value = call()
    except ToolError as told:
        error, fault, shown = str(told), told.fault, told.shown
    except InvalidArguments as refusal:
        error, fault = str(refusal), "policy"
    except WrongResult as wrong:
        error, fault = str(wrong), "tool"
    except BaseException as raised:  # SystemExit too: it would end a thread silently
        error, fault = describe(raised), "tool"
    return ToolResult(value, time.perf_counter() - began, error, fault, shown=shown)


class _Thread(threading.Thread):
    """One call; puts itself into `ended` when it returns."""

    def __init__(self, request: ToolRequest, ended: "queue.SimpleQueue[_Thread]") -> None:
        super().__init__(daemon=True, name=f"tether call of {request.name}")
        self.request, self.ended = request, ended
        self.returned: ToolResult | None = None

    def run(self) -> None:
        self.returned = attempt(lambda: self.request.run(self.request.arguments))
        self.ended.put(self)


_stuck: list[_Thread] = []


def call_all(requests: Sequence[ToolRequest]) -> list[ToolResult]:
    """Make every call, several at once; return the results in the order of the requests."""
    results: list[ToolResult | None] = [None] * len(requests)
    waiting = deque(enumerate(requests))
    running: dict[_Thread, tuple[int, float]] = {}  # number of the request, and its deadline
    ended: queue.SimpleQueue[_Thread] = queue.SimpleQueue()
    while waiting or running:
        while waiting and len(running) < MAX_PARALLEL_CALLS:
            number, request = waiting.popleft()
            if _count_stuck() >= MAX_STUCK:
                results[number] = _not_called(request)
                continue
            thread = _Thread(request, ended)
            running[thread] = (number, time.perf_counter() + request.timeout_seconds)
            thread.start()
        _wait(running, ended, results)
    return [result for result in results if result is not None]


def _wait(
    running: dict[_Thread, tuple[int, float]],
    ended: "queue.SimpleQueue[_Thread]",
    results: list[ToolResult | None],
) -> None:
    """Wait until one call ends or runs out of time."""
    if not running:
        return
    first = min(deadline for _, deadline in running.values())
    try:
        thread = ended.get(timeout=max(0.0, first - time.perf_counter()))
    except queue.Empty:
        now = time.perf_counter()
        for thread, (number, deadline) in list(running.items()):
            if deadline <= now:
                del running[thread]
                _stuck.append(thread)
                results[number] = _timed_out(thread.request)
    else:
        if thread in running:  # one that was abandoned has its result already
            number, _ = running.pop(thread)
            results[number] = thread.returned


def _timed_out(request: ToolRequest) -> ToolResult:
    limit = request.timeout_seconds
    why = f"it took longer than timeout_seconds = {limit:g}"
    return ToolResult(None, limit, why, "tool", abandoned=True)


def _not_called(request: ToolRequest) -> ToolResult:
    return ToolResult(
        None, 0.0, f"it was not called, as {MAX_STUCK} earlier calls still hang", "tool"
    )


def _count_stuck() -> int:
    _stuck[:] = [thread for thread in _stuck if thread.is_alive()]
    return len(_stuck)
