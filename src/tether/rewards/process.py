"""The process in which rewards run, as the trainer sees it. Imports no torch.

What a reward starts may outlive it and hold the ends of its pipes. So nothing here waits for a pipe
to close or to have room: rows are written as far as there is room, between two looks at what came
back, and the end of the process is asked of the system.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from tether.errors import UserError
from tether.rewards.parts import Part
from tether.rewards.prints import Prints

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
