"""What rewards print: the newest of it, in memory and in a file of the run. Imports no torch."""

import codecs
import contextlib
import os
import threading
from pathlib import Path

LARGEST_FILE = 1 << 20  # bytes; of more, the older half is dropped
LARGEST_MEMORY = 1 << 16  # characters, until a file takes them
DROPPED = "[what was printed before this is no longer kept]\n"


class Prints:
    """Reads what child processes print, for as long as they or what they left behind print it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = ""
        self._path: Path | None = None
        self._threads: list[threading.Thread] = []

    @property
    def newest(self) -> str:
        """The last of what was printed; nothing in it steers a terminal."""
        with self._lock:
            return self._newest

    def keep_in(self, path: Path) -> None:
        """From now on in this file as well, with what was printed so far."""
        with self._lock:
            self._path = path
            self._write(self._newest)

    def follow(self, fd: int) -> None:
        """Read a pipe to its end. In a thread, so that nobody who prints ever waits for us."""
        thread = threading.Thread(target=self._read, args=(fd,), daemon=True, name="tether prints")
        self._threads.append(thread)
        thread.start()

    def settle(self, seconds: float = 0.5) -> None:
        """Wait for the last words of a process that has ended; a copy of it may still hold the
        pipe, and nobody waits for that."""
        for thread in self._threads:
            thread.join(seconds)
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def _read(self, fd: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while chunk := os.read(fd, 1 << 16):
            self._take(harmless(decoder.decode(chunk)))
        self._take(harmless(decoder.decode(b"", final=True)))
        os.close(fd)

    def _take(self, text: str) -> None:
        with self._lock:
            self._newest = (self._newest + text)[-LARGEST_MEMORY:]
            self._write(text)

    def _write(self, text: str) -> None:
        if self._path is None or not text:
            return
        # A disk that is full is said by the files that a run cannot do without.
        with contextlib.suppress(OSError):
            with self._path.open("ab") as file:
                file.write(text.encode("utf-8", "backslashreplace"))
                size = file.tell()
            if size > LARGEST_FILE:
                kept = self._path.read_bytes()[-LARGEST_FILE // 2 :].partition(b"\n")[2]
                self._path.write_bytes(DROPPED.encode() + kept)


def harmless(text: str) -> str:
    """Escape codes and the like made visible; lines stay lines."""
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
