"""Forward a run's numbers to one tracker, in a process of its own that only reads the run.

`python -m tether.run.tracking.process RUN TRACKER` sends what has not been sent yet, and ends.
With --follow it goes on until its standard input closes. That is how a run starts it: however the
run ends, the pipe closes, and what is in the files by then is still sent.

RUN/trackers/TRACKER/position.json remembers what was sent, so that a resumed run, which writes the
iterations after its checkpoint again, doubles none. Imports no torch.
"""

import argparse
import fcntl
import json
import os
import signal
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tether.errors import UserError
from tether.run.directory import CONFIG, EVALS, METRICS, TIMINGS, TRACKERS, is_run
from tether.run.lock import LOCK, has_locks
from tether.run.tracking.backends import NAMES, Sink, open_sink
from tether.support.strict_yaml import load_yaml

POSITION = "position.json"
SAYS = "tether: "  # begins the line that says why it failed
POLL_SECONDS = 1.0
GRACE_SECONDS = 20.0  # that a tracker has once its run has ended
KEYS = ("schema", "iteration")  # in every line besides its numbers
PREFIXES = {METRICS: "", TIMINGS: "", EVALS: "eval/"}  # of the names, by file


class Tail:
    """The lines of a file as they are added, from the first."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.line = path, 0, 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self.offset:  # cut back, as a resume does
                self.offset = self.line = 0
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.offset, self.line = self.offset + len(line), self.line + 1
                try:
                    yield json.loads(line)
                except ValueError:
                    raise UserError(f"{self.path}, line {self.line} is not JSON.") from None


class Position:
    """The key of the tracker's run, and the newest iteration sent from each file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / POSITION
        saved = json.loads(self.path.read_bytes()) if self.path.exists() else {}
        self.key: str | None = saved.get("key")
        self.sent: dict[str, int] = dict.fromkeys(PREFIXES, -1) | saved.get("sent", {})

    def save(self) -> None:
        staged = self.path.with_suffix(".tmp")
        staged.write_text(json.dumps({"key": self.key, "sent": self.sent}) + "\n")
        os.replace(staged, self.path)


class Forwarder:
    """Sends the new lines of a run's files to a tracker."""

    def __init__(self, run: Path, tracker: str, folder: Path) -> None:
        self.position = Position(folder)
        self.tails = {name: Tail(run / name) for name in PREFIXES}
        config = load_yaml((run / CONFIG).read_text(encoding="utf-8"))
        name = run.resolve().name
        self.sink: Sink = open_sink(tracker, name, folder, config, self.position.key)
        self.position.key = self.sink.key
        self.position.save()

    def forward(self) -> None:
        """Log each new iteration once: its metrics, timings and evaluations together."""
        steps: dict[int, dict[str, float]] = defaultdict(dict)
        sent = dict(self.position.sent)
        for name, tail in self.tails.items():
            for record in tail.read():
                if record["iteration"] > sent[name]:
                    sent[name] = record["iteration"]
                    steps[sent[name]] |= numbers_in(record, PREFIXES[name])
        for step in sorted(steps):
            self.sink.log(step, steps[step])
        if steps:
            self.sink.flush()
            self.position.sent = sent
            self.position.save()


def numbers_in(record: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the numbers of a line by name, without null (not finite), text and booleans."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if name in KEYS:
            continue
        if isinstance(value, Mapping):
            found |= numbers_in(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{name}"] = value
    return found


def track(run: Path, tracker: str, ended: threading.Event) -> None:
    """Send what there is and what comes, until `ended` is set and all of it is sent."""
    if not is_run(run):
        raise UserError(f"{run} is not a run: there is no {CONFIG} in it.")
    if tracker not in NAMES:
        raise UserError(f"{tracker!r} is not a tracker; there are {', '.join(NAMES)}.")
    folder = run / TRACKERS / tracker
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        # The process of a killed run may still be sending its last lines; it ends soon.
        if has_locks(lock.fileno()):
            fcntl.flock(lock, fcntl.LOCK_EX)
        forwarder = Forwarder(run, tracker, folder)
        while not ended.is_set():
            forwarder.forward()
            ended.wait(POLL_SECONDS)
        forwarder.forward()
        forwarder.sink.close()


def end_with_input(ended: threading.Event) -> None:
    """Set `ended` when standard input closes; an alarm then ends a process whose tracker hangs."""

    def wait() -> None:
        while os.read(0, 1 << 10):  # not sys.stdin, whose lock would be held at exit
            pass
        ended.set()
        signal.alarm(int(GRACE_SECONDS) + 1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tether.run.tracking.process", description=__doc__
    )
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("tracker", help="tensorboard, wandb, trackio or mlflow")
    parser.add_argument("--follow", action="store_true", help="go on until standard input closes")
    asked = parser.parse_args()
    ended = threading.Event()
    if asked.follow:
        os.nice(10)  # the run comes first
        end_with_input(ended)
    else:
        ended.set()
    try:
        track(asked.run, asked.tracker, ended)
    except UserError as error:
        print(f"{SAYS}{error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:  # a tracker may raise anything; the run reads why
        traceback.print_exc()
        print(f"{SAYS}{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
