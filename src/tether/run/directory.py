"""Where runs are stored, and the names of the files in one."""

import json
import os
import shutil
from pathlib import Path

from tether.errors import UserError
from tether.run.lock import HOLDER, LOCK, is_being_written

SCHEMA = 1
RUNS = Path("runs")

CONFIG = "config.yaml"
RECIPE = "recipe.yaml"  # of a run of several stages, each a run in a folder of its own
FINGERPRINT = "fingerprint.json"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
SAMPLERS = "samplers.jsonl"
EVALS = "evals.jsonl"
RESPONSES = "evals"  # a folder: what was said in each of them
EVENTS = "events.jsonl"
PROMPTS = "prompts.jsonl"
REWARD_LOG = "reward.log"
VERDICTS = "verdicts.jsonl"  # what a judge or a reward server said; never cut back
ROLLOUTS = "rollouts"
CHECKPOINTS = "checkpoints"
LATEST = "LATEST"
TRACKERS = "trackers"
# What a new run may hold before its config.yaml.
BEFORE_CONFIG = {LOCK, HOLDER, FINGERPRINT, f".{FINGERPRINT}", REWARD_LOG, VERDICTS, ROLLOUTS}
BEFORE_CONFIG |= {"config.tmp", "recipe.tmp"}


def create_run_directory(directory: Path | None, name: str, overwrite: bool) -> Path:
    """Create a directory: the one asked for, or the next free runs/NAME-001, -002, …"""
    if directory is None:
        return _next_free(name)
    refuse_taken(directory, overwrite)
    try:
        if is_run(directory) or is_pipeline(directory):
            _clear_away(directory.resolve())  # of a link, what it leads to; the link stays
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_made(directory, error) from None
    return directory


def _clear_away(directory: Path) -> None:
    """Remove a run. By a rename first: a kill in the middle must not leave half of it in place."""
    replaced = directory.with_name(f".{directory.name}-replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    os.rename(directory, replaced)
    shutil.rmtree(replaced)
    directory.mkdir()


def _cannot_be_made(directory: Path, error: OSError) -> UserError:
    shown = str(directory)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}…"
    return UserError(f"run.dir {shown} cannot be made: {error.strerror}.")


def refuse_taken(directory: Path | None, overwrite: bool) -> None:
    """Refuse to touch anything that exists, except a run that is to be replaced."""
    try:
        taken = directory is not None and directory.exists() and not _is_bare(directory)
    except OSError as error:  # a name that is too long, or a folder that cannot be looked into
        raise _cannot_be_made(directory or RUNS, error) from None
    if directory is None or not taken:
        return
    ours = any((directory / name).is_file() for name in (METRICS, LOCK))
    known = is_run(directory) or is_pipeline(directory)
    if not (known and ours):  # a config.yaml alone may belong to another program
        raise UserError(f"run.dir {directory} exists and is not a run; choose another.")
    if not overwrite:
        raise UserError(
            f"run.dir {directory} exists; choose another, continue it with --resume, or replace "
            f"it with --run.overwrite true."
        )
    if is_being_written(directory):
        raise UserError(f"run.dir {directory} is being written by another process.")
    if Path.cwd().is_relative_to(directory.resolve()):
        raise UserError(
            f"run.dir {directory} is where this command runs, and would be removed from under it; "
            f"run it from another folder."
        )


def started_in(run: Path) -> Path | None:
    """Return the folder in which a run was started, if it says so and the folder is there."""
    try:
        if not (run / FINGERPRINT).is_file():
            return None
        folder = Path(json.loads((run / FINGERPRINT).read_bytes())["folder"])
        return folder if folder.is_dir() else None
    except (OSError, ValueError, KeyError, TypeError):  # a resume says what is wrong with it
        return None


def is_run(directory: Path) -> bool:
    return (directory / CONFIG).is_file()


def is_pipeline(directory: Path) -> bool:
    """Return whether it is a run of several stages."""
    return (directory / RECIPE).is_file() and not is_run(directory)


def _is_bare(directory: Path) -> bool:
    """Return whether it is empty, or was left by a process that ended before it had written the
    config, which is what makes a folder a run."""
    if not directory.is_dir():
        return False
    names = {path.name for path in directory.iterdir()}
    empty = ROLLOUTS not in names or not any((directory / ROLLOUTS).iterdir())
    return names <= BEFORE_CONFIG and empty


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
