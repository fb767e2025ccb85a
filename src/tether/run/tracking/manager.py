"""Trackers of a running run: a process each, which only reads the run's files.

So nothing that a tracker does can stop, slow or change the run. One that is not installed, fails,
ends or hangs costs one event; `python -m tether.run.tracking.process` can send the rest later.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tether.run.directory import TRACKERS
from tether.run.metrics import Event
from tether.run.tracking.process import GRACE_SECONDS, SAYS

LONGEST_REASON = 300  # characters; a tracker may say anything


class Trackers:
    """The tracker processes of one run."""

    def __init__(self, run: Path, names: Sequence[str]) -> None:
        self.run, self.names = run, names
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> list[Event]:
        """Start all trackers; return an event for each that could not be started."""
        problems = []
        for name in dict.fromkeys(self.names):
            try:
                self.processes[name] = self._spawn(name)
            except OSError as error:
                problems.append(self._problem(name, f"could not be started: {error.strerror}"))
        return problems

    def ended(self) -> list[Event]:
        """Return an event for each tracker that ended since the last call: none should."""
        problems = []
        for name, process in list(self.processes.items()):
            code = process.poll()
            if code is not None:
                del self.processes[name]
                problems.append(self._problem(name, self._reason(name, code)))
        return problems

    def close(self) -> list[Event]:
        """Let the trackers send the last lines; stop those that need more than GRACE_SECONDS."""
        problems = self.ended()
        for process in self.processes.values():
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + GRACE_SECONDS
        for name, process in self.processes.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
                if code != 0:
                    problems.append(self._problem(name, self._reason(name, code)))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                _kill(process)
                problems.append(self._problem(name, "was still busy after the run, and stopped"))
        self.processes.clear()
        return problems

    def _spawn(self, name: str) -> subprocess.Popen[bytes]:
        log = self._log(name)
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as output:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tether.run.tracking.process",
                    str(self.run),
                    name,
                    "--follow",
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the run, which ends its trackers in order
            )

    def _log(self, name: str) -> Path:
        return self.run / TRACKERS / f"{name}.log"

    def _reason(self, name: str, code: int) -> str:
        """Return the tracker's own last words, or its exit code."""
        with contextlib.suppress(OSError):
            log = self._log(name).read_text(encoding="utf-8", errors="replace")
            said = [line for line in log.splitlines() if line.startswith(SAYS)]
            if said and code != 0:
                return f"failed: {said[-1].removeprefix(SAYS)[:LONGEST_REASON].rstrip('.')}"
        return f"ended with code {code}"

    def _problem(self, name: str, reason: str) -> Event:
        resend = f"`python -m tether.run.tracking.process {self.run} {name}` sends the rest"
        return Event("tracker", f"tracker {name} {reason}; the run goes on, {resend}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
