"""Keep what a child process prints: the newest of it in memory, and more in a file. No torch."""

import codecs
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

LARGEST_FILE = 1 << 20  # bytes; of more, the older half is dropped
LARGEST_MEMORY = 1 << 16  # characters of the newest that stay in memory
DROPPED = "[what was printed before this is no longer kept]\n"


class ChildOutput:
    """Read what child processes print, for as long as they or what they left behind print it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = ""
        self._path: Path | None = None
        self._threads: list[threading.Thread] = []

    @property
    def newest(self) -> str:
        """The last of what was printed, with control characters escaped."""
        with self._lock:
            return self._newest

    def keep_in(self, path: Path) -> None:
        """Write what is printed from now on, and what is in memory, to this file as well."""
        with self._lock:
            self._path = path
            self._write(self._newest)

    @contextlib.contextmanager
    def pipe(self) -> Iterator[int]:
        """Yield a file descriptor for a child to print to; start the child inside.

        A thread reads the other end, so that a child never waits for room in the pipe.
        """
        reading, writing = os.pipe()
        thread = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._threads.append(thread)
        thread.start()
        try:
            yield writing
        finally:
            os.close(writing)

    def settle(self, seconds: float = 0.5) -> None:
        """Wait for the last output of a child that has ended. A fork of it may hold the pipe for
        longer; that is not waited for."""
        for thread in self._threads:
            thread.join(seconds)
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def _read(self, fd: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while chunk := os.read(fd, 1 << 16):
            self._take(escape_controls(decoder.decode(chunk)))
        self._take(escape_controls(decoder.decode(b"", final=True)))
        os.close(fd)

    def _take(self, text: str) -> None:
        with self._lock:
            self._newest = (self._newest + text)[-LARGEST_MEMORY:]
            self._write(text)

    def _write(self, text: str) -> None:
        if self._path is None or not text:
            return
        # A full disk is reported for the files that a run cannot do without.
        with contextlib.suppress(OSError):
            with self._path.open("ab") as file:
                file.write(text.encode("utf-8", "backslashreplace"))
                size = file.tell()
            if size > LARGEST_FILE:
                kept = self._path.read_bytes()[-LARGEST_FILE // 2 :].partition(b"\n")[2]
                self._path.write_bytes(DROPPED.encode() + kept)


def escape_controls(text: str) -> str:
    """Make escape codes and the like visible; lines stay lines."""
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
