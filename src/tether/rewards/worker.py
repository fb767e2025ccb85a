"""The process in which rewards run, as the trainer sees it. Imports no torch.

What a reward starts may outlive it and hold the ends of its pipes. So nothing here waits for a pipe
to close or to have room: rows are written as far as there is room, between two looks at what came
back, and the end of the process is asked of the system.
"""

import codecs
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.errors import UserError
from tether.rewards.parts import Part

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


TICK_SECONDS = 0.1  # between two looks at whether the process still runs
LONGEST_ANSWER = 1 << 20  # bytes of a line
FOREIGN = "the reward wrote into the pipe that its scores go through"


class RewardProcess:
    def __init__(self, parts: Sequence[Part], import_seconds: float, prints: Prints) -> None:
        rows_out, self.rows_fd = os.pipe()
        self.verdicts_fd, verdicts_in = os.pipe()
        prints_out, prints_in = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tether.rewards.child", str(rows_out), str(verdicts_in)],
            pass_fds=(rows_out, verdicts_in),
            stdin=subprocess.DEVNULL,
            stdout=prints_in,
            stderr=prints_in,
            start_new_session=True,  # a group of its own, so that what it forks dies with it
        )
        for fd in (rows_out, verdicts_in, prints_in):
            os.close(fd)
        prints.follow(prints_out)
        os.set_blocking(self.rows_fd, False)
        os.set_blocking(self.verdicts_fd, False)
        self.unsent, self.received = bytearray(), b""
        self.answers = 0
        try:
            self._begin(parts, import_seconds)
        except BaseException:  # a signal too: nobody else knows this process yet
            self.kill()
            raise

    def _begin(self, parts: Sequence[Part], import_seconds: float) -> None:
        """Hand over what to load, by the pipe: the command line is for everybody to read."""
        spec = [{"kind": part.kind, "arguments": dict(part.arguments)} for part in parts]
        self.send([json.dumps(spec)])
        kinds = ", ".join(part.kind for part in parts)
        answer = self.receive(
            import_seconds,
            f"{kinds} took longer to import than reward.import_timeout_seconds = "
            f"{import_seconds:g}; raise it, or import less",
        )
        if isinstance(answer, str):
            raise UserError(f"The reward does not start: {answer}.")
        if "refused" in answer:
            raise UserError(answer["refused"])

    def send(self, lines: Sequence[str]) -> None:
        """Rows are on their way from here on; `receive` sees to it."""
        self.unsent += "".join(f"{line}\n" for line in lines).encode()

    def receive(self, seconds: float, late: str) -> dict[str, Any] | str:
        """The next answer, or a sentence about why there is none: `late` when time is up."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.received:
            left = deadline - time.monotonic()
            if left <= 0:
                return late
            if len(self.received) > LONGEST_ANSWER:
                return FOREIGN
            ended = self.process.poll() is not None
            came = self._exchange(0.0 if ended else min(left, TICK_SECONDS))
            if came == b"" and not ended:
                return self._hung_up()
            if ended and not came:
                return f"the reward's process ended with code {self.process.returncode}"
            self.received += came or b""
        line, _, self.received = self.received.partition(b"\n")
        self.answers += 1
        return self._read(line)

    def _exchange(self, seconds: float) -> bytes | None:
        """Write what there is room for; what came back, None if nothing did, b"" at the end."""
        writing = [self.rows_fd] if self.unsent else []
        readable, writable, _ = select.select([self.verdicts_fd], writing, [], seconds)
        if writable:
            try:
                del self.unsent[: os.write(self.rows_fd, self.unsent[: 1 << 16])]
            except BrokenPipeError:
                self.unsent.clear()  # nobody reads any more; the end of the process says why
            except BlockingIOError:
                pass  # less room than a single write takes
        with contextlib.suppress(BlockingIOError):
            return os.read(self.verdicts_fd, 1 << 16) if readable else None
        return None

    def _hung_up(self) -> str:
        """Of a pipe that was closed at the other end: usually by a process that ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"the reward's process ended with code {self.process.wait(1.0)}"
        return "the reward closed the pipe that its scores go through"

    def _read(self, line: bytes) -> dict[str, Any] | str:
        """One answer; a line that the child did not write, in this place, is not one."""
        try:
            answer = json.loads(line)
            whole = answer["number"] == self.answers and (
                isinstance(answer.get("score"), float | None)
                and isinstance(answer.get("error"), str | None)
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            whole = False
        return answer if whole else FOREIGN

    def kill(self) -> None:
        """End the process and what it started in its group. Nothing is waited for but its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.verdicts_fd)
        os.close(self.rows_fd)
