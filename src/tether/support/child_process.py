"""A child process that answers requests in JSON lines. Imports no torch.

Several rooms run code in a child because it may hang, crash or take all memory: rewards, a model's
chat template, an inference engine. `ChildProcess` is the parent's side, `serve` the child's.

    child = ChildProcess("tether.rewards.child", setup, seconds=120)    # python -m … IN OUT
    child.send([request, …])
    answer = child.receive(seconds=10)                                   # or raises ChildFailed
    child.kill()

The first request is the setup, and the child answers it with {"ready": true} or
{"refused": sentence}. Requests and answers travel through two pipes of their own, so that nothing
the child's code prints can pass for an answer, and each answer is numbered. The child dies with its
parent and has a process group of its own, so that what it forks is killed with it.

Programs that the child's code started may outlive it and hold the ends of its pipes. So nothing
here waits for a pipe to close or to have room: requests are written as far as there is room,
between two looks at what came back, and the system is asked whether the process has ended.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from tether.errors import UserError

Answer = dict[str, Any]
Respond = Callable[[str], Iterable[Answer]]  # from the line of one request to its answers

TICK_SECONDS = 0.1  # between two checks whether the process still runs
CHUNK_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1


class ChildFailed(Exception):
    """There is no answer, and there will be none; the message says why."""


class ChildTimedOut(ChildFailed):
    """The answer took longer than it may."""


class ChildEnded(ChildFailed):
    """The process has ended, with `code`."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}'s process ended with code {code}")
        self.code = code


class ChildProcess:
    """Run `python -m MODULE` as a child and exchange JSON lines with it.

    `name` stands for the child in messages. What it prints goes to `output`, a file descriptor or
    an open file. Raises `UserError` where the child refuses the setup and `ChildFailed` where it
    does not get ready within `seconds` (None: no limit).
    """

    def __init__(
        self,
        module: str,
        setup: object = None,
        *,
        name: str,
        seconds: float | None,
        output: int | IO[bytes] = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
        max_answer_bytes: int | None = None,
    ) -> None:
        self.name, self.max_answer_bytes = name, max_answer_bytes
        requests_out, self._requests = os.pipe()
        self._answers, answers_in = os.pipe()
        self._owner = os.getpid()
        self._unsent, self._received, self._scanned = bytearray(), bytearray(), 0
        self._num_answers = 0
        try:
            self.process = subprocess.Popen(
                # Unbuffered, so that prints are kept of a child that is killed.
                [sys.executable, "-u", "-m", module, str(requests_out), str(answers_in)],
                pass_fds=(requests_out, answers_in),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=None if environment is None else dict(environment),
                start_new_session=True,  # Ctrl-C is for the parent
            )
        finally:
            os.close(requests_out)
            os.close(answers_in)
        os.set_blocking(self._requests, False)
        os.set_blocking(self._answers, False)
        try:
            self.send([json.dumps(setup)])
            answer = self.receive(seconds)
            if "refused" in answer:
                raise UserError(answer["refused"])
        except BaseException:  # a signal too: no caller knows this process yet
            self.kill()
            raise

    @property
    def usable(self) -> bool:
        """Whether it still runs and this process started it: a fork must not share the pipes."""
        return self._owner == os.getpid() and self.process.poll() is None

    def send(self, lines: Iterable[str]) -> None:
        """Queue requests, a line of JSON each; `receive` writes them as there is room."""
        self._unsent += "".join(f"{line}\n" for line in lines).encode()

    def receive(self, seconds: float | None) -> Answer:
        """Return the next answer. Raise `ChildFailed` if it cannot come or takes longer than
        `seconds`; the child is then of no more use, and the caller kills it."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (end := self._received.find(b"\n", self._scanned)) < 0:
            self._scanned = len(self._received)
            if self.max_answer_bytes is not None and self._scanned > self.max_answer_bytes:
                raise self.garbled()
            left = TICK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise ChildTimedOut(f"{self.name} took longer than {seconds:g} s")
            ended = self.process.poll() is not None
            chunk = self._exchange(0.0 if ended else min(left, TICK_SECONDS))
            if chunk == b"" and not ended:
                raise self._hung_up()
            if ended and not chunk:
                raise ChildEnded(self.name, self.process.returncode)
            self._received += chunk or b""
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._scanned = 0
        self._num_answers += 1
        return self._parse(line)

    def ask(self, request: object, seconds: float | None) -> Answer:
        """Send one request and return its answer."""
        self.send([json.dumps(request)])
        return self.receive(seconds)

    def kill(self) -> None:
        """End the process and its group. Waits for nothing but the end of the process itself."""
        if self._requests < 0:
            return
        if self._owner == os.getpid():  # in a fork of the parent the child is not ours to kill
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._requests)
        os.close(self._answers)
        self._requests = self._answers = -1

    def _exchange(self, seconds: float) -> bytes | None:
        """Write what there is room for. Return what came back: None for nothing, b"" at the end."""
        writing = [self._requests] if self._unsent else []
        readable, writable, _ = select.select([self._answers], writing, [], seconds)
        if writable:
            try:
                del self._unsent[: os.write(self._requests, self._unsent[:CHUNK_BYTES])]
            except BrokenPipeError:
                self._unsent.clear()  # the end of the process says why
            except BlockingIOError:
                pass  # less room than a single write takes
        with contextlib.suppress(BlockingIOError):
            return os.read(self._answers, CHUNK_BYTES) if readable else None
        return None

    def _hung_up(self) -> ChildFailed:
        """Explain a pipe that was closed at the other end: usually the process is ending."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return ChildEnded(self.name, self.process.wait(1.0))
        return ChildFailed(f"{self.name} closed the pipe that its answers go through")

    def garbled(self) -> ChildFailed:
        """Return the error for an answer that `serve` did not write."""
        return ChildFailed(f"{self.name} wrote into the pipe that its answers go through")

    def _parse(self, line: bytes) -> Answer:
        """Read one answer; a line that `serve` did not write, in this place, is not one."""
        try:
            answer = json.loads(line)
            if answer.pop("number") == self._num_answers:
                return answer
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        raise self.garbled()


def serve(set_up: Callable[[Any], Respond]) -> None:
    """Answer requests until the parent closes the pipe: the `main` of a child's module.

    `set_up` gets the first request and returns the function that answers the others; a `UserError`
    that it raises is the parent's to raise.
    """
    die_with_parent()
    requests_fd, answers_fd = int(sys.argv[-2]), int(sys.argv[-1])
    for fd in (requests_fd, answers_fd):
        os.set_inheritable(fd, False)  # programs that the child's code starts must not hold them
    own, number = os.getpid(), 0
    with os.fdopen(requests_fd, encoding="utf-8") as requests, os.fdopen(answers_fd, "w") as pipe:

        def write(answer: Answer) -> None:
            nonlocal number
            if os.getpid() != own:
                os._exit(0)  # a fork made by the child's code: its answer would pass for the next
            number += 1
            pipe.write(json.dumps({**answer, "number": number}) + "\n")
            pipe.flush()

        try:
            respond = set_up(json.loads(requests.readline()))
        except UserError as error:
            return write({"refused": str(error)})
        write({"ready": True})
        for line in requests:
            for answer in respond(line):
                write(answer)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends. (Linux only.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(extra_bytes: int) -> None:
    """Allow this process `extra_bytes` of address space beyond what it holds now. (Linux only.)"""
    sizes = Path("/proc/self/statm")
    if sizes.is_file():
        import resource

        limit = int(sizes.read_text().split()[0]) * resource.getpagesize() + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
