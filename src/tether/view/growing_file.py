"""Read files that another process may be writing, and that need not be what they seem.

Nothing outside the folder that was asked for is ever opened, and no byte is read twice: a growing
file is read on from where the last reading ended.
"""

import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

ANCHOR_BYTES = 256
BATCH_LINES = 256
SETTLED_SECONDS = 2.0  # a writer flushes whole lines; half a line that stays was cut off

Signature = tuple[int, int, int, int]


class Unreadable(Exception):
    """Why a file is not shown, in words for the page."""


def open_inside(root: Path, path: Path) -> BinaryIO:
    """Open a regular file under `root`, a resolved path. Links that lead out are refused."""
    try:
        inside = path.resolve().is_relative_to(root)
        if not inside:
            raise Unreadable(f"{path.name} is a link that leads out of the folder.")
        descriptor = os.open(path.resolve(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise Unreadable(f"{path.name} is missing.") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = getattr(error, "strerror", None) or "it links to itself"
        raise Unreadable(f"{path.name} cannot be read: {reason}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unreadable(f"{path.name} is not a regular file.")
    return os.fdopen(descriptor, "rb")


def bounded_lines(file: BinaryIO, limit: int) -> Iterator[tuple[bytes, int]]:
    """Yield each line without its end, and its size; a line above `limit` comes empty."""
    while line := file.readline(limit + 1):
        size, part = len(line), line
        while len(part) > limit and not part.endswith(b"\n"):
            part = file.readline(limit + 1)
            size += len(part)
        size -= part.endswith(b"\n")
        yield (line.removesuffix(b"\n") if size <= limit else b""), size


def signature(path: Path) -> Signature | None:
    """Return what changes whenever a file does; None if there is no file."""
    try:
        s = os.stat(path)
    except OSError:
        return None
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns


def parse_object(line: str) -> dict[str, Any] | None:
    """Return the JSON object of a line, None if it is not one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def parse_objects(lines: Sequence[str]) -> list[dict[str, Any] | None]:
    """Parse many lines: as one list where all are complete, which takes half the time."""
    try:
        together = json.loads(f"[{','.join(lines)}]")
    except (ValueError, RecursionError):
        together = []
    if len(together) == len(lines) and all(type(record) is dict for record in together):
        return together
    return [parse_object(line) for line in lines]


class GrowingLines:
    """The JSON objects of a growing file of lines, each read once.

    A file that was cut back or replaced, as by a resume, is read again from its start, and
    `generation` counts how often that happened. The last bytes before the offset are compared
    at each reading, so a file that was cut and has grown again is noticed too.
    """

    def __init__(self, root: Path, path: Path) -> None:
        self.root, self.path = root, path
        self.generation = 0
        self._forget()

    def _forget(self) -> None:
        self.offset = 0
        self.lines = 0
        self.half_written = False
        self.damage: list[str] = []
        self.unreadable: str | None = None
        self._anchor = b""
        self._seen: Signature | None = None

    def fresh(self) -> Iterator[dict[str, Any]]:
        """Return the objects since the last call; all of them when `generation` has changed."""
        now = signature(self.path)
        if now is not None and now == self._seen:
            return iter(())
        try:
            data = self._read(now)
        except Unreadable as problem:
            if self.offset:
                self._start_over()
            self.unreadable = str(problem)
            return iter(())
        self.unreadable = None
        self._seen = now
        complete, _, rest = data.rpartition(b"\n")
        self.half_written = bool(rest)
        if not complete and not data:
            return iter(())
        consumed = len(data) - len(rest)
        self.offset += consumed
        self._anchor = (self._anchor + data[:consumed])[-ANCHOR_BYTES:]
        return self._parse(complete.decode("utf-8", "replace") if consumed else "")

    def _read(self, now: Signature | None) -> bytes:
        """Return the bytes after the offset, which is 0 again if those before it have changed."""
        replaced = bool(self._seen and now and self._seen[:2] != now[:2])
        with open_inside(self.root, self.path) as file:
            file.seek(self.offset - len(self._anchor))
            data = file.read()
            if not replaced and data.startswith(self._anchor):
                return data[len(self._anchor) :]
            self._start_over()
            file.seek(0)
            return file.read()

    def _start_over(self) -> None:
        self._forget()
        self.generation += 1

    def _parse(self, text: str) -> Iterator[dict[str, Any]]:
        lines = text.split("\n") if text else []
        for start in range(0, len(lines), BATCH_LINES):
            batch = lines[start : start + BATCH_LINES]
            for record in parse_objects(batch):
                self.lines += 1
                if record is None:
                    self.damage.append(f"{self.path.name}, line {self.lines} is not a JSON object.")
                else:
                    yield record

    def problems(self) -> list[str]:
        """Return what is wrong with this file, in at most a few sentences."""
        if self.unreadable:
            return [self.unreadable]
        found = self.damage[:3]
        if len(self.damage) > 3:
            found.append(f"{self.path.name} has {len(self.damage) - 3} more damaged lines.")
        settled = self._seen and time.time() - self._seen[3] / 1e9 > SETTLED_SECONDS
        if self.half_written and settled:
            found.append(f"{self.path.name} ends in half a line, which is left out.")
        return found


def last_object(root: Path, path: Path, window: int = 1 << 16) -> dict[str, Any] | None:
    """Return the last complete JSON object of a file of lines, read from its end."""
    with open_inside(root, path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - window))
        lines = file.read().split(b"\n")[:-1]
    if size > window:
        lines = lines[1:]  # the first one was cut by the window
    objects = (parse_object(line.decode("utf-8", "replace")) for line in reversed(lines))
    return next((record for record in objects if record is not None), None)
