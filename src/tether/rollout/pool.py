"""Samplers apart from training: chunks are handed to whoever is free, and handed out again when a
sampler is lost. Who computes a chunk, when and how often changes no bit of it.

A thread hands out and collects. It alone speaks to the samplers, through a `Fleet`.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from tether.data.batching import concat_rollouts
from tether.errors import RunStopped, SamplerLost, one_line
from tether.rollout.chunks import Chunk
from tether.rollout.sampler import Draw
from tether.run.metrics import Event
from tether.types import Rollout

POLL_SECONDS = 0.05
WHILE_CLOSING_SECONDS = 10.0


@dataclass(frozen=True)
class Weights:
    """What the samplers sample with."""

    serial: int  # no two of a run have the same
    version: int  # iterations that they have learnt from
    tensors: Mapping[str, Tensor]


@runtime_checkable
class Fleet(Protocol):
    """Where the samplers are. A ticket stands for work under way."""

    def add(self, name: str) -> tuple[Any, Any]:
        """Begin to start a sampler; return it and a ticket."""
        ...

    def share(self, weights: Weights) -> Any:
        """Make weights available to all samplers, those that are yet to come included."""
        ...

    def ask(self, sampler: Any, weights: Weights, shared: Any, chunk: Chunk) -> Any:
        """Begin to sample a chunk; return a ticket."""
        ...

    def wait(self, tickets: Sequence[Any], seconds: float) -> Collection[Any]:
        """Wait until some work has ended, or the time is over; return the tickets of what has."""
        ...

    def result(self, ticket: Any) -> Any:
        """Return what came of work that has ended. Raises SamplerLost if its sampler is gone."""
        ...

    def end(self, sampler: Any) -> None:
        """End a sampler, whatever it does."""
        ...

    def room(self) -> str:
        """Say what there is room for, in the middle of a sentence."""
        ...

    def close(self) -> None:
        """End all samplers."""
        ...


@dataclass(frozen=True)
class ChunkRecord:
    """Who sampled what with which weights, and when. Seconds are of the monotonic clock."""

    purpose: str
    iteration: int | None  # that will train on the rows; None: an evaluation's greedy ones
    version: int
    first_row: int
    rows: int
    sampler: str
    asked: float
    began: float
    ended: float
    lost: int  # times that it was begun in vain before


class Handout:
    """The chunks of one call, in row order."""

    def __init__(self, weights: Weights, chunks: Sequence[Chunk]) -> None:
        self.weights, self.asked = weights, time.monotonic()
        self.parts: list[Rollout | None] = [None] * len(chunks)
        self.error: Exception | None = None
        self.over = threading.Event()

    def result(self) -> Rollout:
        """Wait for all chunks; return their rows in order."""
        while not self.over.wait(1.0):
            pass
        if self.error is not None:
            raise self.error
        return concat_rollouts([part for part in self.parts if part is not None])

    def put(self, number: int, rollout: Rollout) -> None:
        self.parts[number] = rollout
        if all(part is not None for part in self.parts):
            self.over.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.over.set()


@dataclass(eq=False)
class Work:
    """One chunk of a batch."""

    batch: Handout
    number: int
    chunk: Chunk
    lost: int = 0


@dataclass(eq=False)
class Member:
    """A sampler, as far as the pool knows."""

    name: str
    sampler: Any
    ticket: Any
    since: float
    ready: bool = False
    work: Work | None = None


@dataclass
class Tally:
    """What the samplers did since it was last asked for."""

    since: float = field(default_factory=time.monotonic)
    chunks: list[ChunkRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    ready: int = 0
    queued: int = 0

    def lines(self, began: float) -> list[dict[str, Any]]:
        """Return the chunks as samplers.jsonl holds them, in seconds from then on."""
        return [
            {
                "sampler": chunk.sampler,
                "purpose": chunk.purpose,
                "iteration": chunk.iteration,
                "version": chunk.version,
                "rows": [chunk.first_row, chunk.first_row + chunk.rows],
                "asked": round(chunk.asked - began, 4),
                "began": round(chunk.began - began, 4),
                "ended": round(chunk.ended - began, 4),
                "lost": chunk.lost,
            }
            for chunk in self.chunks
        ]

    def timings(self) -> dict[str, float]:
        """Return the metrics of `timings.jsonl`."""
        seconds = max(time.monotonic() - self.since, 1e-9)
        busy = sum(c.ended - max(c.began, self.since) for c in self.chunks)
        lost = sum(event.kind == "sampler_lost" for event in self.events)
        return {
            "samplers/ready": float(self.ready),
            "samplers/chunks": float(len(self.chunks)),
            "samplers/queued": float(self.queued),
            "samplers/lost": float(lost),
            "samplers/idle_share": max(0.0, 1 - busy / (seconds * max(self.ready, 1))),
        }


class SamplerPool:
    """Keeps `size` samplers at work, as far as there is room for them."""

    def __init__(
        self,
        fleet: Fleet,
        size: int,
        timeout_seconds: float,
        start_timeout_seconds: float,
        max_lost: int,
    ) -> None:
        self.fleet, self.size = fleet, size
        self.timeout_seconds, self.max_lost = timeout_seconds, max_lost
        self.start_timeout_seconds = start_timeout_seconds
        self.changed = threading.Condition()
        self.members: list[Member] = []
        self.queue: deque[Work] = deque()
        self.shared: dict[int, Any] = {}  # by serial number of the weights
        self.tally = Tally()
        self.names = itertools.count(1)
        self.lost_at_start = 0  # in a row
        self.began = time.monotonic()
        self.broken: Exception | None = None
        self.closing = False
        self.thread = threading.Thread(target=self._run, name="samplers", daemon=True)

    def start(self) -> None:
        """Begin to start the samplers; return once the first is there."""
        self.thread.start()
        with self.changed:
            while not self.broken and not any(member.ready for member in self.members):
                self.changed.wait(1.0)
        if self.broken is not None:
            raise self.broken

    def begin(self, weights: Weights, chunks: Sequence[Chunk]) -> Handout:
        """Have chunks sampled. Those of earlier calls come first."""
        batch = Handout(weights, chunks)
        with self.changed:
            if self.broken is not None:
                raise self.broken
            self.queue.extend(Work(batch, i, chunk) for i, chunk in enumerate(chunks))
            self.changed.notify()
        return batch

    def take_tally(self) -> Tally:
        """Return what the samplers did since the last call."""
        with self.changed:
            found, self.tally = self.tally, Tally()
            found.ready = sum(member.ready for member in self.members)
            found.queued = len(self.queue)
        return found

    def close(self) -> None:
        """End all samplers."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        if self.thread.is_alive():
            self.thread.join(WHILE_CLOSING_SECONDS)
        for member in self.members:  # a cluster that goes on would keep them
            with suppress(RunStopped):
                self.fleet.end(member.sampler)
        self.fleet.close()

    def _run(self) -> None:
        try:
            while not self.closing:
                self._turn()
        except Exception as error:  # a fault of the program: nobody may wait for ever
            self._break(error)

    def _turn(self) -> None:
        """Hand out what can be, and collect what has ended."""
        with self.changed:
            self._fill()
            self._hand_out()
            tickets = [m.ticket for m in self.members if m.work is not None or not m.ready]
            if not tickets:
                self.changed.wait(POLL_SECONDS)
                return
        ended = self.fleet.wait(tickets, POLL_SECONDS)
        for member in [m for m in self.members if m.ticket in ended]:
            self._collect(member)
        self._give_up_on_the_slow()

    def _fill(self) -> None:
        while self.broken is None and len(self.members) < self.size:
            name = f"sampler {next(self.names)}"
            sampler, ticket = self.fleet.add(name)
            self.members.append(Member(name, sampler, ticket, time.monotonic()))

    def _hand_out(self) -> None:
        for member in self.members:
            if not self.queue:
                break
            if member.ready and member.work is None:
                work = self.queue.popleft()
                weights = work.batch.weights
                member.work, member.since = work, time.monotonic()
                shared = self._shared(weights)
                member.ticket = self.fleet.ask(member.sampler, weights, shared, work.chunk)
        used = {work.batch.weights.serial for work in self.queue}
        used |= {m.work.batch.weights.serial for m in self.members if m.work is not None}
        newest = max(self.shared, default=None)
        self.shared = {s: ref for s, ref in self.shared.items() if s in used or s == newest}

    def _shared(self, weights: Weights) -> Any:
        if weights.serial not in self.shared:
            self.shared[weights.serial] = self.fleet.share(weights)
        return self.shared[weights.serial]

    def _collect(self, member: Member) -> None:
        """Take what a sampler has brought: itself, a chunk, an error, or nothing any more."""
        found: Any = None
        error: Exception | None = None
        try:
            found = self.fleet.result(member.ticket)
        except SamplerLost as lost:
            self._lose(member, one_line(lost))
            return
        except Exception as raised:
            error = raised
        with self.changed:
            work, member.work = member.work, None
            if work is None:
                if error is not None:
                    self._break(error)
                    return
                member.ready, self.lost_at_start = True, 0
                self.changed.notify_all()
            elif error is not None:
                self._fail(work.batch, error)
            else:
                self._note(member, work)
                work.batch.put(work.number, found)

    def _note(self, member: Member, work: Work) -> None:
        choice, weights = work.chunk.choice, work.batch.weights
        drawn = isinstance(choice, Draw)
        self.tally.chunks.append(
            ChunkRecord(
                purpose=choice.purpose if drawn else "greedy",
                iteration=choice.iteration if drawn else None,
                version=weights.version,
                first_row=work.chunk.first,
                rows=len(work.chunk),
                sampler=member.name,
                asked=work.batch.asked,
                began=member.since,
                ended=time.monotonic(),
                lost=work.lost,
            )
        )

    def _lose(self, member: Member, why: str) -> None:
        """Go on without a sampler: its chunk is the next to be handed out."""
        self.fleet.end(member.sampler)
        with self.changed:
            self.members.remove(member)
            self.tally.events.append(Event("sampler_lost", f"{member.name}: {why}"))
            work = member.work
            if work is None:
                self.lost_at_start += not member.ready
                if self.lost_at_start > self.max_lost:
                    self._break(
                        RunStopped(
                            f"{self.lost_at_start} samplers in a row were lost while they started "
                            f"(launch.max_restarts = {self.max_lost}); the last: {why}."
                        )
                    )
                return
            work.lost += 1
            if work.lost > self.max_lost:
                first, last = work.chunk.first, work.chunk.first + len(work.chunk) - 1
                self._fail(
                    work.batch,
                    RunStopped(
                        f"Rows {first} to {last} were begun {work.lost} times, and each time their "
                        f"sampler was lost (launch.max_restarts = {self.max_lost}); the last: "
                        f"{why}."
                    ),
                )
            elif not work.batch.over.is_set():
                self.queue.appendleft(work)

    def _give_up_on_the_slow(self) -> None:
        now, ready = time.monotonic(), any(member.ready for member in self.members)
        for member in list(self.members):
            if member.work is not None and now > member.since + self.timeout_seconds:
                limit = f"{self.timeout_seconds:g} s (launch.timeout_seconds)"
                self._lose(member, f"no answer in {limit}")
        limit = self.start_timeout_seconds
        if not ready and self.members and now > max(m.since for m in self.members) + limit:
            self._break(
                RunStopped(
                    f"No sampler has started in {limit:g} s (launch.start_timeout_seconds): "
                    f"launch.samplers = {self.size}, and {self.fleet.room()}."
                )
            )

    def _fail(self, batch: Handout, error: Exception) -> None:
        batch.fail(error)
        self.queue = deque(work for work in self.queue if work.batch is not batch)

    def _break(self, error: Exception) -> None:
        """End all work: there are no samplers, and there will be none."""
        with self.changed:
            self.broken, self.closing = error, True
            batches = {work.batch for work in self.queue}
            batches |= {m.work.batch for m in self.members if m.work is not None}
            for batch in batches:
                batch.fail(error)
            self.changed.notify_all()
