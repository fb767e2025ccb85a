"""Checkpoints as folders: whole or not there, and what is damaged is known by its hashes.

checkpoints/000050/manifest.json    SHA-256 of every other file, written last
checkpoints/LATEST                  the name of the newest, for people and scripts

A checkpoint is staged beside its place and moved there by one rename, so a kill leaves the old ones
and at most some staged rubbish. Whoever loads one trusts the manifests alone, never LATEST. Each
process hashes the files that it wrote, and the manifest is made of what they say, not of what a
folder shows: on a file system over the network it may show a file of another machine late. A resume
has every process verify a share of them.

*Damaged* is what can be read and is not what was written, or is missing. What cannot be read (no
permission, a failing disk) may be whole, so nothing is decided about it: that is an error.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tether.errors import UserError
from tether.run.directory import CHECKPOINTS, LATEST, SCHEMA
from tether.run.reader import NotRegular, open_regular, read_regular

MANIFEST = "manifest.json"
STAGED = ".staged-"
DAMAGED = "damaged-"
NAME = re.compile(r"[0-9]{6,}")  # anything else in the folder belongs to another program
HASHING_THREADS = 4
T = TypeVar("T")
R = TypeVar("R")
GONE = (errno.ENOENT, errno.ENOTDIR)


def publish(run: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a staged folder, then seal it with a manifest and move it to its place."""
    try:
        staged = stage(run, name)
        write(staged)
        return finish(staged, name, seal_files(staged, _files(staged)))
    except Exception:
        discard(run, name)
        raise


def stage(run: Path, name: str) -> Path:
    """Create an empty folder for the files of a new checkpoint."""
    discard(run, name)
    staged = run / CHECKPOINTS / f"{STAGED}{name}"
    staged.mkdir(parents=True)
    return staged


def seal_files(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Wait until files of a staged folder are on the disk; return their hashes, by name."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666

    def seal(file: Path) -> str:
        _give_mode(file, mode)
        sync(file)
        return _sha256(file)

    written = list(files)
    return dict(
        zip([str(f.relative_to(folder)) for f in written], _each(seal, written), strict=True)
    )


def finish(staged: Path, name: str, hashes: Mapping[str, str]) -> Path:
    """Write the manifest of a staged folder and move it to its place."""
    folder = staged.parent
    _write_manifest(staged, hashes)
    os.rename(staged, folder / name)
    sync(folder)
    _point_latest(folder, name)
    return folder / name


def discard(run: Path, name: str) -> None:
    """Remove what was staged: a full disk gets its space back."""
    shutil.rmtree(run / CHECKPOINTS / f"{STAGED}{name}", ignore_errors=True)


def all_checkpoints(run: Path) -> list[Path]:
    """List the checkpoints, newest first, damaged or not, without those that are staged or set
    aside and without files of other programs."""
    folder = run / CHECKPOINTS
    try:
        names = os.listdir(folder)
    except OSError as error:
        if error.errno in GONE:
            return []
        raise _unreadable(folder, error) from None
    found = [folder / name for name in names if NAME.fullmatch(name) and _is_folder(folder / name)]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if error.errno in GONE and path.is_symlink():
            raise UserError(
                f"{path} is a link to {os.readlink(path)}, which is not there; bring that back, "
                f"or remove the link to go on without this checkpoint."
            ) from None
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> UserError:
    reason = (error.strerror or str(error)).lower()
    return UserError(
        f"{path} cannot be read: {reason}. It may be whole, so nothing was changed; make it "
        f"readable to this user (a colleague's files: chmod -R g+rX), or move it away to go on "
        f"without it."
    )


def newest_whole(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest checkpoint whose every file is as it was written, and what is wrong with
    the newer ones."""
    damaged = {}
    for checkpoint in all_checkpoints(run):
        problem = problem_with(checkpoint)
        if problem is None:
            return checkpoint, damaged
        damaged[checkpoint] = problem
    return None, damaged


def latest_checkpoint(run: Path) -> Path:
    """Return the newest whole checkpoint, or refuse a run that has none."""
    checkpoint, damaged = newest_whole(run)
    if checkpoint is None:
        why = f": {next(iter(damaged.values()))}" if damaged else " yet"
        raise UserError(f"{run} has no whole checkpoint{why}.")
    return checkpoint


def problem_with(checkpoint: Path) -> str | None:
    """Say what is damaged; None if every file is there and every hash is right.

    Raises a UserError for what cannot be read.
    """
    hashes = promised_files(checkpoint)
    if isinstance(hashes, str):
        return hashes
    return next(iter(damaged_files(checkpoint, hashes).values()), None)


def promised_files(checkpoint: Path) -> dict[str, str] | str:
    """Return the hashes of all files by the manifest, or what is wrong with the manifest."""
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(read_regular(path))
        hashes, schema = manifest["sha256"], manifest["schema"]
        if schema != SCHEMA or not isinstance(hashes, dict) or not hashes:
            return f"{MANIFEST} is of another version or empty"
    except (ValueError, KeyError, TypeError) as error:
        return _damage(MANIFEST, error)
    except OSError as error:
        return _damage_unless_unreadable(MANIFEST, path, error)
    return hashes


def damaged_files(checkpoint: Path, hashes: Mapping[str, str]) -> dict[str, str]:
    """Say what is wrong with each of these files that is not what was written, in their order."""

    def problem(name: str) -> str | None:
        path = checkpoint / name
        try:
            return None if _sha256(path) == hashes[name] else f"{name} is damaged"
        except ValueError as error:
            return _damage(name, error)
        except OSError as error:
            return _damage_unless_unreadable(name, path, error)

    found = zip(hashes, _each(problem, list(hashes)), strict=True)
    return {name: what for name, what in found if what is not None}


def _damage_unless_unreadable(name: str, path: Path, error: OSError) -> str:
    if error.errno not in GONE:
        raise _unreadable(path, error) from None
    return f"{name} is missing or damaged"


def _damage(name: str, error: Exception) -> str:
    what = "not a regular file" if isinstance(error, NotRegular) else "missing or damaged"
    return f"{name} is {what}"


def set_aside(checkpoint: Path) -> Path:
    """Move a damaged checkpoint out of the way of a good one; nothing is ever deleted."""
    place, number = checkpoint.with_name(f"{DAMAGED}{checkpoint.name}"), 1
    while os.path.lexists(place):
        number += 1
        place = checkpoint.with_name(f"{DAMAGED}{checkpoint.name}-{number}")
    os.rename(checkpoint, place)
    return place


def sweep(run: Path) -> None:
    """Remove what an interrupted save left behind."""
    for staged in (run / CHECKPOINTS).glob(f"{STAGED}*"):
        _remove(staged)
    (run / CHECKPOINTS / f".{LATEST}").unlink(missing_ok=True)


def prune(run: Path, keep: Iterable[Path]) -> None:
    """Remove all checkpoints but these."""
    kept = set(keep)
    for checkpoint in all_checkpoints(run):
        if checkpoint not in kept:
            # By a rename first: a kill in the middle must not leave half a checkpoint in place.
            staged = checkpoint.with_name(f"{STAGED}{checkpoint.name}")
            os.rename(checkpoint, staged)
            _remove(staged)


def disk_bytes(run: Path) -> int:
    """Return what the run's own checkpoints take on the run's disk; links lead elsewhere."""
    folders = [path for path in all_checkpoints(run) if not path.is_symlink()]
    return sum(file.lstat().st_size for folder in folders for file in _files(folder))


def _remove(path: Path) -> None:
    """Remove a folder; of a link, the link alone."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_manifest(folder: Path, hashes: Mapping[str, str]) -> None:
    manifest = folder / MANIFEST
    text = json.dumps({"schema": SCHEMA, "sha256": dict(sorted(hashes.items()))}, indent=1)
    manifest.write_text(text + "\n", encoding="utf-8")
    sync(manifest)
    for inside in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(inside)


def _each(function: Callable[[T], R], things: Sequence[T]) -> list[R]:
    """Return what the function gives for each, a few at a time: hashing does not hold the GIL."""
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        return list(threads.map(function, things))


def follow_umask(folder: Path) -> None:
    """Give every file the permissions that this process's umask asks for, as its folder has them.
    safetensors writes files that their owner alone can read, which a colleague could not resume."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path in _files(folder):
        _give_mode(path, mode)


def _give_mode(path: Path, mode: int) -> None:
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def _files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if path != folder / MANIFEST)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _point_latest(folder: Path, name: str) -> None:
    staged = folder / f".{LATEST}"
    staged.write_text(name + "\n", encoding="utf-8")
    sync(staged)
    os.replace(staged, folder / LATEST)
    sync(folder)
