"""One writer a run: a lock that the kernel drops however its holder ends, so none is ever stale."""

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from tether.errors import UserError

LOCK = "lock"
PATIENCE_SECONDS = 1.0  # a reader that only asks holds the lock for a moment


class RunLock:
    """Held by whoever writes the run, for as long as it is entered."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def __enter__(self) -> "RunLock":
        self.descriptor = os.open(self.run / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _try(self.descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                os.close(self.descriptor)
                raise UserError(f"{self.run} is being written by another process; wait for it.")
            time.sleep(0.02)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self.descriptor)


def is_being_written(run: Path) -> bool:
    """Whether a process is training this run now."""
    try:
        descriptor = os.open(run / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
