"""Ctrl-C and SIGTERM: the first lets the iteration under way finish, the second ends at once."""

import os
import signal
import threading
from types import FrameType


class Interrupt:
    """While entered, remembers the first signal in `signal` instead of dying of it."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "Interrupt":
        # Only the main thread may set handlers; elsewhere (a notebook's worker) nothing changes.
        watched = (signal.SIGINT, signal.SIGTERM)
        in_main = threading.current_thread() is threading.main_thread()
        self.before = {s: signal.signal(s, self._remember) for s in watched} if in_main else {}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = signal.Signals(number)
