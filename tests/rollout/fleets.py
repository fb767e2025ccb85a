"""Samplers apart without Ray: threads of this process, that die, hang and come late on demand."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tether.errors import SamplerLost

MAKING = threading.Lock()  # loading a model changes torch's defaults meanwhile, for all threads


@dataclass(eq=False)
class Ticket:
    over: threading.Event = field(default_factory=threading.Event)
    found: Any = None
    error: Exception | None = None

    def end(self, found: Any = None, error: Exception | None = None) -> None:
        if not self.over.is_set():
            self.found, self.error = found, error
            self.over.set()


class Seat:
    """A sampler: a thread that does what it is given, one after the other."""

    def __init__(self, number: int, make: Callable[[], Any], fleet: "Threads") -> None:
        self.number, self.fleet, self.serial, self.dead = number, fleet, None, False
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.ticket = self.started = Ticket()
        threading.Thread(target=self._live, args=(make,), daemon=True).start()

    def _live(self, make) -> None:
        self.fleet.wait_to_start(self.number)
        try:
            with MAKING:
                self.host = make()
        except Exception as error:
            return self.started.end(error=error)
        self.started.end(self.number)
        while not self.dead:
            ticket, weights, chunk = self.jobs.get()
            try:
                if weights.serial != self.serial:
                    self.host.load(weights.version, weights.tensors)
                    self.serial = weights.serial
                fault = self.fleet.fault(self.number, chunk)
                if fault == "hang":
                    continue
                found = self.host.sample(chunk)
                if fault == "die":
                    self.die()
                ticket.end(found)
            except Exception as error:
                ticket.end(error=error)

    def die(self) -> None:
        self.dead = True
        self.ticket.end(error=SamplerLost("it died"))


class Threads:
    """A fleet. `fault(number, chunk)` says "die", "hang" or None for each chunk that is begun;
    `wait_to_start(number)` returns when that sampler has room."""

    def __init__(self, make: Callable[[], Any], fault=None, wait_to_start=None) -> None:
        self.make, self.seats = make, []
        self.fault = fault or (lambda number, chunk: None)
        self.wait_to_start = wait_to_start or (lambda number: None)
        self.shared: list[int] = []  # versions, in the order in which they were sent out
        self.asked: list[tuple[int, int, int]] = []  # sampler, version, first row
        self.closed = False

    def add(self, name: str):
        seat = Seat(len(self.seats), self.make, self)
        self.seats.append(seat)
        return seat, seat.started

    def share(self, weights) -> Any:
        self.shared.append(weights.version)
        return weights

    def ask(self, sampler, weights, shared, chunk) -> Ticket:
        assert shared is weights
        self.asked.append((sampler.number, weights.version, chunk.first))
        sampler.ticket = ticket = Ticket()
        if sampler.dead:
            ticket.end(error=SamplerLost("it died"))
        sampler.jobs.put((ticket, weights, chunk))
        return ticket

    def wait(self, tickets: Sequence[Ticket], seconds: float) -> list[Ticket]:
        deadline = time.monotonic() + seconds
        while not (ended := [t for t in tickets if t.over.is_set()]):
            if time.monotonic() > deadline:
                return []
            time.sleep(0.001)
        return ended

    def result(self, ticket: Ticket) -> Any:
        if ticket.error is not None:
            raise ticket.error
        return ticket.found

    def end(self, sampler) -> None:
        sampler.die()

    def room(self) -> str:
        return "there is room for none"

    def close(self) -> None:
        self.closed = True
        for seat in self.seats:
            seat.die()
