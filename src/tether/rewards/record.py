"""The record of what servers said: RUN/verdicts.jsonl, one object per row that was judged.

    {"schema": 1, "iteration": 3, "row": 17, "hash": "…", "answer": "Score: 7"}

The hash is of what the server was asked. A judge need not say the same twice, so a run that is
resumed or repeated takes what was said the first time. Each line is on the disk before its score is
used, and no line is ever taken back: a run that went back to a checkpoint finds the verdicts of the
iterations that it does again. A request that failed is there, with the problem in place of the
answer, once the run has gone on without its row.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tether.errors import RunStopped, UserError

SCHEMA = 1
Key = tuple[int, int, str]  # iteration, row, hash


def hash_of(asked: object) -> str:
    """Return the hash of a request."""
    text = json.dumps(asked, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class VerdictRecord:
    """What servers said, in memory and, once a run has a directory, in its file."""

    def __init__(self, earlier: str | None = None) -> None:
        self._known: dict[Key, dict[str, Any]] = {}
        self._written: set[Key] = set()
        self._path: Path | None = None
        if earlier is not None:
            if not Path(earlier).is_file():
                raise UserError(f"reward.arguments.record names {earlier}, which is not a file.")
            self._load(Path(earlier))

    def keep_in(self, path: Path) -> None:
        """Write to this file from now on, and take what it and those of other processes hold."""
        for file in sorted(path.parent.glob(f"{path.stem.split('-')[0]}*{path.suffix}")):
            self._written |= self._load(file)
        self._path = path

    def find(self, key: Key) -> Mapping[str, Any] | None:
        """Return {"answer": …} or {"problem": sentence}, if this was asked before. What an earlier
        run was told is then in the file of this one too."""
        said = self._known.get(key)
        if said is not None and key not in self._written:
            self.add(key, said)
        return said

    def add(self, key: Key, said: dict[str, Any]) -> None:
        """Keep what a server said; it is on the disk when this returns."""
        self._known[key] = said
        if self._path is None:
            return
        self._written.add(key)
        iteration, row, digest = key
        place = {"schema": SCHEMA, "iteration": iteration, "row": row, "hash": digest}
        try:
            with self._path.open("ab+") as file:
                if file.tell() and not _ends_a_line(file):
                    file.write(b"\n")  # a line that a kill cut short stays what it is
                file.write((json.dumps({**place, **said}) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunStopped(f"{self._path} could not be written: {error.strerror}.") from None

    def _load(self, path: Path) -> set[Key]:
        found: set[Key] = set()
        with path.open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                    key = entry["iteration"], entry["row"], entry["hash"]
                    said = {name: entry[name] for name in ("answer", "problem") if name in entry}
                    if said:
                        self._known[key] = said
                        found.add(key)
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue  # half a line, after a kill
        return found


def _ends_a_line(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
