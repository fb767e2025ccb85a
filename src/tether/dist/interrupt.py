"""Handle Ctrl-C, SIGTERM and SIGHUP: drop sampling or scoring under way, finish an update or a
write, then save the state. A second signal ends at once.

Where several processes run the loop, they agree on a signal between two pieces of work, and none
is dropped: the others would wait for a process that has left.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from tether.dist.collectives import gather
from tether.dist.ray_mailbox import forwarded_signal
from tether.dist.world import world

ECHO_SECONDS = 2.0


class Dropped(BaseException):
    """The work under way was dropped for a signal; nothing of it has been saved or written."""


class Interrupt:
    """Context manager that records the first signal in `signal` instead of ending the process.

    Among several processes `signal` is set by `agree` alone, so that it is the same on all; one
    that a process receives while it waits there is made known by the next `agree`.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._received: signal.Signals | None = None  # by this process, agreed on or not
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
        """Let a signal inside raise Dropped, until `hold` is called."""
        self.agree()
        if self.signal is not None:
            raise Dropped
        self._may_drop = world().size == 1
        try:
            yield
        finally:
            self._may_drop = False

    def hold(self) -> None:
        """Finish the work under way: from here on a signal no longer drops it."""
        self._may_drop = False

    def agree(self) -> None:
        """Make a signal that one process received known to all."""
        sent = gather(self._received or forwarded_signal())
        heard = [number for number in sent if number is not None]
        if heard and self.signal is None:
            self.signal, self._heard = heard[0], time.monotonic()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if (self._received or self.signal) is not None and not self._is_echo():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._received = signal.Signals(number)
        self._heard = time.monotonic()
        if world().size == 1:
            self.signal = self._received
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self._may_drop:
            raise Dropped

    def _leave_terminal(self) -> None:
        """Write to /dev/null from now on: a line to a closed terminal would fail the save."""
        for number in self._terminals:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)

    def _is_echo(self) -> bool:
        """Return whether a launcher passed on a signal that the terminal had sent to all."""
        return world().size > 1 and time.monotonic() - self._heard < ECHO_SECONDS
