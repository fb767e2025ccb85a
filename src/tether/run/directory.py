"""Where runs lie, and the names of the files in one."""

import shutil
from pathlib import Path

from tether.errors import UserError

SCHEMA = 1
RUNS = Path("runs")

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
EVALS = "evals.jsonl"
EVENTS = "events.jsonl"
ROLLOUTS = "rollouts"
CHECKPOINTS = "checkpoints"
LATEST = "LATEST"


def create_run_directory(directory: Path | None, name: str, overwrite: bool) -> Path:
    """A new directory: the one asked for, or the next free runs/NAME-001, -002, …"""
    if directory is None:
        return _next_free(name)
    refuse_taken(directory, overwrite)
    if directory.exists():
        shutil.rmtree(directory)
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"run.dir {directory} cannot be made: {error.strerror}.") from None
    return directory


def refuse_taken(directory: Path | None, overwrite: bool) -> None:
    """Only a run may be replaced, and only when asked; nothing else that exists is touched."""
    if directory is None or not directory.exists():
        return
    if not ((directory / CONFIG).is_file() and (directory / METRICS).is_file()):
        raise UserError(f"run.dir {directory} exists and is no run; choose another.")
    if not overwrite:
        raise UserError(
            f"run.dir {directory} exists; choose another, or replace it by --run.overwrite true."
        )


def _next_free(name: str) -> Path:
    for number in range(1, 10_000):
        directory = RUNS / f"{name}-{number:03d}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{directory} cannot be made: {error.strerror}; set run.dir.") from None
        return directory
    raise UserError(f"runs/ holds 9999 runs named {name!r}; set run.name or run.dir.")
