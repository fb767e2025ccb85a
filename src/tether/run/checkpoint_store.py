"""Checkpoints as folders: whole or not there, and what is damaged is known by its hashes.

checkpoints/000050/manifest.json    SHA-256 of every other file, written last
checkpoints/LATEST                  the name of the newest, for people and scripts

A checkpoint is staged beside its place and moved there by one rename, so a kill leaves the old ones
and at most some staged rubbish. Whoever loads one trusts the manifests alone, never LATEST.

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
from collections.abc import Callable, Iterable
from pathlib import Path

from tether.errors import UserError
from tether.run.directory import CHECKPOINTS, LATEST, SCHEMA
from tether.run.reader import NotRegular, open_regular, read_regular

MANIFEST = "manifest.json"
STAGED = ".staged-"
DAMAGED = "damaged-"
NAME = re.compile(r"[0-9]{6,}")  # anything else in the folder belongs to another program
GONE = (errno.ENOENT, errno.ENOTDIR)


def publish(run: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a staged folder, then seal it with a manifest and move it to its place."""
    try:
        staged = stage(run, name)
        write(staged)
        return finish(staged, name)
    except Exception:
        discard(run, name)
        raise


def stage(run: Path, name: str) -> Path:
    """Create an empty folder for the files of a new checkpoint."""
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
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(read_regular(path))
        hashes, schema = manifest["sha256"], manifest["schema"]
        if schema != SCHEMA or not isinstance(hashes, dict) or not hashes:
            return f"{MANIFEST} is of another version or empty"
        for name, expected in hashes.items():
            path = checkpoint / name
            if _sha256(path) != expected:
                return f"{name} is damaged"
    except (ValueError, KeyError, TypeError) as error:
        what = "not a regular file" if isinstance(error, NotRegular) else "missing or damaged"
        return f"{path.relative_to(checkpoint)} is {what}"
    except OSError as error:
        if error.errno not in GONE:
            raise _unreadable(path, error) from None
        return f"{path.relative_to(checkpoint)} is missing or damaged"
    return None


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


def _seal(folder: Path) -> None:
    follow_umask(folder)
    for path in _files(folder):
        sync(path)
    hashes = {str(path.relative_to(folder)): _sha256(path) for path in _files(folder)}
    manifest = folder / MANIFEST
    text = json.dumps({"schema": SCHEMA, "sha256": hashes}, indent=1)
    manifest.write_text(text + "\n", encoding="utf-8")
    sync(manifest)
    for inside in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(inside)


def follow_umask(folder: Path) -> None:
    """Give every file the permissions that this process's umask asks for, as its folder has them.
    safetensors writes files that their owner alone can read, which a colleague could not resume."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path in _files(folder):
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
