"""Checkpoints as folders: whole or not there, and what is damaged is known by its hashes.

checkpoints/000050/manifest.json    SHA-256 of every other file, written last
checkpoints/LATEST                  the name of the newest, for people and scripts

A checkpoint is staged beside its place and moved there by one rename, so a kill leaves the old ones
and at most some staged rubbish. Whoever loads one trusts the manifests alone, never LATEST.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from tether.errors import UserError
from tether.run.directory import CHECKPOINTS, LATEST, SCHEMA

MANIFEST = "manifest.json"
STAGED = ".staged-"
DAMAGED = "damaged-"


def publish(run: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a staged folder, seal it with a manifest, move it to its place."""
    try:
        staged = stage(run, name)
        write(staged)
        return finish(staged, name)
    except Exception:
        discard(run, name)
        raise


def stage(run: Path, name: str) -> Path:
    """An empty folder for the files of a checkpoint to come."""
    discard(run, name)
    staged = run / CHECKPOINTS / f"{STAGED}{name}"
    staged.mkdir(parents=True)
    return staged


def finish(staged: Path, name: str) -> Path:
    """Seal a staged folder with a manifest and move it to its place."""
    folder = staged.parent
    _seal(staged)
    os.rename(staged, folder / name)
    sync(folder)
    _point_latest(folder, name)
    return folder / name


def discard(run: Path, name: str) -> None:
    """A full disk gets its space back."""
    shutil.rmtree(run / CHECKPOINTS / f"{STAGED}{name}", ignore_errors=True)


def all_checkpoints(run: Path) -> list[Path]:
    """Newest first, damaged or not; staged and set-aside ones are not among them."""
    folder = run / CHECKPOINTS
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def newest_whole(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint whose every file is as it was written, and what is wrong with the
    newer ones."""
    damaged = {}
    for checkpoint in all_checkpoints(run):
        problem = problem_with(checkpoint)
        if problem is None:
            return checkpoint, damaged
        damaged[checkpoint] = problem
    return None, damaged


def latest_checkpoint(run: Path) -> Path:
    """The newest whole checkpoint, for whoever wants to use the model."""
    checkpoint, damaged = newest_whole(run)
    if checkpoint is None:
        why = f": {next(iter(damaged.values()))}" if damaged else " yet"
        raise UserError(f"{run} has no whole checkpoint{why}.")
    return checkpoint


def problem_with(checkpoint: Path) -> str | None:
    """What is damaged, in words; None if every file is there and every hash is right."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
        hashes, schema = manifest["sha256"], manifest["schema"]
        if schema != SCHEMA or not isinstance(hashes, dict) or not hashes:
            return f"{MANIFEST} is of another version or empty"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or damaged"
    for name, expected in hashes.items():
        try:
            if _sha256(checkpoint / name) != expected:
                return f"{name} is damaged"
        except OSError as error:
            return f"{name} cannot be read ({(error.strerror or str(error)).lower()})"
    return None


def set_aside(checkpoint: Path) -> Path:
    """Out of the way, so that a good one can take its place; nothing is deleted."""
    place = checkpoint.with_name(f"{DAMAGED}{checkpoint.name}")
    shutil.rmtree(place, ignore_errors=True)
    os.rename(checkpoint, place)
    return place


def sweep(run: Path) -> None:
    """Remove what an interrupted save left behind."""
    for staged in (run / CHECKPOINTS).glob(f"{STAGED}*"):
        shutil.rmtree(staged)
    (run / CHECKPOINTS / f".{LATEST}").unlink(missing_ok=True)


def prune(run: Path, keep: Iterable[Path]) -> None:
    kept = set(keep)
    for checkpoint in all_checkpoints(run):
        if checkpoint not in kept:
            # By a rename first: a kill in the middle must not leave half a checkpoint in place.
            staged = checkpoint.with_name(f"{STAGED}{checkpoint.name}")
            os.rename(checkpoint, staged)
            shutil.rmtree(staged)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seal(folder: Path) -> None:
    for path in _files(folder):
        sync(path)
    hashes = {str(path.relative_to(folder)): _sha256(path) for path in _files(folder)}
    manifest = folder / MANIFEST
    text = json.dumps({"schema": SCHEMA, "sha256": hashes}, indent=1)
    manifest.write_text(text + "\n", encoding="utf-8")
    sync(manifest)
    for inside in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(inside)


def _files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if path != folder / MANIFEST)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _point_latest(folder: Path, name: str) -> None:
    staged = folder / f".{LATEST}"
    staged.write_text(name + "\n", encoding="utf-8")
    sync(staged)
    os.replace(staged, folder / LATEST)
    sync(folder)
