"""One writer per run: a lock that the kernel releases when its holder ends, so none is stale."""

import fcntl
import os
import stat
import time
from pathlib import Path
from types import TracebackType

from tether.errors import UserError

LOCK = "lock"
PATIENCE_SECONDS = 1.0  # a reader that only asks holds the lock for a moment


class RunLock:
    """Held by the process that writes the run, for as long as it is entered."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def __enter__(self) -> "RunLock":
        self.descriptor = self._open()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _try(self.descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                os.close(self.descriptor)
                raise UserError(f"{self.run} is being written by another process; wait for it.")
            time.sleep(0.02)
        return self

    def _open(self) -> int:
        path = self.run / LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(
                f"{path} cannot be opened for writing: {reason}; a run is written by one process "
                f"at a time, which holds this file."
            ) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UserError(f"{path} is not a regular file; remove it.")
        return descriptor

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self.descriptor)


def is_being_written(run: Path) -> bool:
    """Return whether a process is training this run now. A FIFO in the lock's place is not
    waited for."""
    try:
        descriptor = os.open(run / LOCK, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return regular and not _try(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
