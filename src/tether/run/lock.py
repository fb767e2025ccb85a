"""One writer per run: a lock that the kernel releases when its holder ends, so none is stale.

Some file systems have none (Lustre mounted without `-o flock`). There a file names its holder, and
is taken over where that process has ended.
"""

import errno
import fcntl
import json
import os
import socket
import stat
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tether.errors import UserError

LOCK = "lock"
HOLDER = "lock.holder"  # where the kernel has no lock to give
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)
PATIENCE_SECONDS = 1.0  # a reader that only asks holds the lock for a moment


class RunLock:
    """Held by the process that writes the run, for as long as it is entered."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.named = False  # by a file, as the file system has no locks

    def __enter__(self) -> "RunLock":
        self.descriptor = self._open()
        if not has_locks(self.descriptor):
            try:
                _take_by_name(self.run)
            except BaseException:
                os.close(self.descriptor)
                raise
            self.named = True
            return self
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
        if self.named:
            (self.run / HOLDER).unlink(missing_ok=True)
        os.close(self.descriptor)


def is_being_written(run: Path) -> bool:
    """Return whether a process is training this run now. A FIFO in the lock's place is not
    waited for."""
    try:
        descriptor = os.open(run / LOCK, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        if not has_locks(descriptor):
            holder = _holder(run)
            return holder is not None and not _has_ended(holder)
        return not _try(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _take_by_name(run: Path) -> None:
    """Write this process's name into the run, if no other one's is there that may still run."""
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid())}
    path, written = run / HOLDER, run / f".{HOLDER}.{mine['host']}.{mine['pid']}"
    holder = _holder(run)
    written.write_text(json.dumps(mine))
    try:
        if holder is not None and _has_ended(holder):
            path.unlink(missing_ok=True)
        os.link(written, path)  # the whole file at once, and only where there is none
    except FileExistsError:
        who = holder or {"pid": "?", "host": "?"}
        raise UserError(
            f"{run} is being written by another process: {path} names process {who['pid']} of "
            f"{who['host']}. The file system has no locks (Lustre has them with -o flock), so "
            f"nothing tells whether that one still runs; if it has ended, remove the file."
        ) from None
    finally:
        written.unlink(missing_ok=True)


def _holder(run: Path) -> dict[str, Any] | None:
    """Return whom the file names; None where there is none, or it cannot be read."""
    try:
        found = json.loads((run / HOLDER).read_text())
        return {"host": str(found["host"]), "pid": int(found["pid"]), "began": found["began"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _has_ended(holder: dict[str, Any]) -> bool:
    """Return whether a holder is known to be gone: of another machine nothing is known."""
    return holder["host"] == socket.gethostname() and _began(holder["pid"]) != holder["began"]


def _began(pid: int) -> int | None:
    """Return when a process of this machine began, in ticks of its clock; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19])


def has_locks(descriptor: int) -> bool:
    """Return whether the file system of an open file knows flock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return False
        raise
    return True


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
