"""Trial runs from a warm fork server: each is a process of its own that a fault can hit."""

import errno
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["tether.api", "tether.cli.display", "faults.trials"])

SIGKILL_CODE = -signal.SIGKILL


@dataclass(frozen=True)
class Trial:
    """A process under way."""

    process: multiprocessing.Process
    output: Path

    def wait(self, seconds: float = 120.0) -> int:
        """The exit code; minus the signal's number if one ended it."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.kill()
            raise TimeoutError(f"no end after {seconds} s; it said: {self.said()}")
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def wait_until_it_trains(self) -> None:
        """Until the self-check is done, or the process has ended."""
        while self.process.is_alive() and "self-check" not in self.said():
            time.sleep(0.005)

    def said(self) -> str:
        if not self.output.exists():
            return ""
        return self.output.read_text(encoding="utf-8", errors="replace")


def start(*words: str | Path, sabotage: Callable[[], None] | None = None, log: Path) -> Trial:
    """`tether WORDS` as a user would type it; `sabotage` is called first, in the new process."""
    process = FORK_SERVER.Process(target=_main, args=([*map(str, words)], sabotage, log))
    process.start()
    return Trial(process, log)


def tether(*words: str | Path, sabotage: Callable[[], None] | None = None, log: Path) -> int:
    return start(*words, sabotage=sabotage, log=log).wait()


def _main(words: list[str], sabotage: Callable[[], None] | None, log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # A fork server's child has no proper streams of its own.
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    from tether.cli.main import main

    if sabotage is not None:
        sabotage()
    sys.argv = ["tether", *words]
    main()


@dataclass(frozen=True)
class AtCall:
    """A fault at the n-th call of any of these functions, given as `module:name`; with `inside`,
    only calls made while that function runs count."""

    functions: tuple[str, ...]
    call: int
    strike: Callable[[], None]
    inside: str | None = None

    def __call__(self) -> None:
        state = {"inside": self.inside is None, "calls": 0}

        def count() -> None:
            state["calls"] += state["inside"]
            if state["inside"] and state["calls"] == self.call:
                self.strike()

        for function in self.functions:
            wrap(function, before=count)
        if self.inside is not None:
            wrap(
                self.inside,
                before=lambda: state.update(inside=True),
                after=lambda: state.update(inside=False),
            )


@dataclass(frozen=True)
class Signals:
    """These signals to the own process: one now, the next while the state is being saved."""

    first: int
    second: int | None = None

    def __call__(self) -> None:
        if self.second is not None:
            wrap(
                "tether.run.checkpoint_store:_sha256",
                before=lambda: os.kill(os.getpid(), self.second),
            )
        os.kill(os.getpid(), self.first)


@dataclass(frozen=True)
class Fill:
    """A file that takes all the space there is left, but for some bytes."""

    path: Path
    leave: int

    def __call__(self) -> None:
        with self.path.open("wb", buffering=0) as ballast:
            while True:
                try:
                    ballast.write(b"x" * 65536)
                except OSError:
                    break
            ballast.truncate(max(0, ballast.seek(0, os.SEEK_END) - self.leave))


@dataclass(frozen=True)
class LimitFiles:
    """No file of this process may grow beyond so many bytes."""

    size: int

    def __call__(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))


@dataclass(frozen=True)
class BreakDisk:
    """From now on every sync reports that the disk failed."""

    def __call__(self) -> None:
        def failing(descriptor: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        os.fsync = failing


@dataclass(frozen=True)
class CountCalls:
    """Writes into a file how often the functions were called inside."""

    functions: tuple[str, ...]
    inside: str
    path: Path

    def __call__(self) -> None:
        state = {"inside": False, "calls": 0}

        def count() -> None:
            state["calls"] += state["inside"]
            self.path.write_text(str(state["calls"]))

        for function in self.functions:
            wrap(function, before=count)
        wrap(
            self.inside,
            before=lambda: state.update(inside=True),
            after=lambda: state.update(inside=False),
        )


def wrap(
    function: str, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> None:
    module_name, _, name = function.partition(":")
    owner = importlib.import_module(module_name)
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    def wrapped(*arguments: object, **named: object) -> object:
        if before is not None:
            before()
        result = original(*arguments, **named)
        if after is not None:
            after()
        return result

    setattr(owner, name, wrapped)
