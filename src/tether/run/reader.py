"""Read runs back, also while they are being written."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from tether.errors import UserError
from tether.run.directory import CONFIG, EVENTS, METRICS, is_run


class NotRegular(ValueError):
    """There is a FIFO, a socket or a device in the place of a file."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading without ever waiting for one that is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """Read a whole file without ever waiting for one that is not a regular file."""
    with open_regular(path) as file:
        return file.read()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON-lines file; a half-written last one is left out."""
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return []
    except NotRegular as problem:
        raise UserError(f"{problem}; remove it.") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{path} cannot be read: {reason}.") from None
    complete, _, _ = content.rpartition(b"\n")
    records = []
    for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
        try:
            record = json.loads(line)
        except ValueError:  # also of bytes that are not text
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number} is not a JSON object; the file is damaged.")
        records.append(record)
    return records


def find_runs(folder: Path) -> list[Path]:
    """Return the runs directly inside a folder, sorted by name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if is_run(path))


def newest_run(folder: Path) -> Path | None:
    """Return the run directly inside a folder that was written to last; None if there is none."""
    runs = find_runs(folder)
    return max(runs, key=_last_written) if runs else None


def _last_written(run: Path) -> float:
    files = [run / name for name in (METRICS, EVENTS, CONFIG)]
    return max(file.stat().st_mtime for file in files if file.is_file())
