"""Reading runs back, also while they are being written."""

import json
from pathlib import Path
from typing import Any

from tether.errors import UserError
from tether.run.directory import is_run


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file; a half-written last one is left out."""
    if not path.is_file():
        return []
    complete, _, _ = path.read_bytes().rpartition(b"\n")
    records = []
    for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
        try:
            record = json.loads(line)
        except ValueError:  # also of bytes that are no text
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number} is no JSON object; the file is damaged.")
        records.append(record)
    return records


def find_runs(folder: Path) -> list[Path]:
    """Runs directly inside a folder, by name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if is_run(path))
