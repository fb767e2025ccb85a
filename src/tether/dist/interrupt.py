"""Ctrl-C, SIGTERM and SIGHUP: what is only being sampled or scored is dropped, what moves weights
or writes files is finished; then the state is saved. A second signal ends at once.

Where several processes run the loop, they agree on a signal between two pieces of work, and none
is dropped: the others would wait for who has left.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from tether.dist.ray_mailbox import forwarded_signal
from tether.dist.collectives import gather
from tether.dist.world import world

ECHO_SECONDS = 2.0


class Dropped(BaseException):
    """The work under way was given up for a signal; nothing of it has been kept or written."""


class Interrupt:
    """While entered, remembers the first signal in `signal` instead of dying of it."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._heard = 0.0
        self._may_drop = False

    def __enter__(self) -> "Interrupt":
        # Only the main thread may set handlers; elsewhere (a notebook's worker) nothing changes.
        in_main = threading.current_thread() is threading.main_thread()
        watched = [signal.SIGINT, signal.SIGTERM] if in_main else []
        if in_main and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` ignores it
            watched.append(signal.SIGHUP)
        self.before = {s: signal.signal(s, self._remember) for s in watched}
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def droppable(self) -> Iterator[None]:
        """A signal inside raises Dropped, unless `hold` was called since."""
        self.agree()
        if self.signal is not None:
            raise Dropped
        self._may_drop = world().size == 1
        try:
            yield
        finally:
            self._may_drop = False

    def hold(self) -> None:
        """From here on the work under way is finished."""
        self._may_drop = False

    def agree(self) -> None:
        """What one process was sent, all have heard."""
        heard = [number for number in gather(self.signal or forwarded_signal()) if number is not None]
        self.signal = heard[0] if heard else None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and not self._is_echo():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = signal.Signals(number)
        self._heard = time.monotonic()
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self._may_drop:
            raise Dropped

    def _leave_terminal(self) -> None:
        """The terminal is gone: a line written to it would fail, and the state be lost for it."""
        for number in self._terminals:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)

    def _is_echo(self) -> bool:
        """A launcher passes on what the terminal has sent to its processes already."""
        return world().size > 1 and time.monotonic() - self._heard < ECHO_SECONDS
