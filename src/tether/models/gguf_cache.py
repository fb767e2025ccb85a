"""A GGUF file unpacked once: as a Hugging Face directory in the user's cache.

Unpacking takes a minute for a model of 135M parameters, and every command would do it anew. What
is kept is named by the SHA-256 of the file and the version of transformers that unpacked it. It
is staged beside its place and renamed there, with a SHA-256 of each of its files; one that does not
match any more is unpacked again.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import transformers

LAYOUT = 1  # of what is kept; another number is another place
MANIFEST = "manifest.json"
Unpack = Callable[[Path, Path], None]  # a file, and the folder to write the model into


def unpack_once(path: Path, unpack: Unpack) -> Path | None:
    """Return the directory that `unpack` made of the file, now or earlier.

    None where there is none: `unpack` failed, and reading the file itself will say why; or nothing
    can be kept, as on a full disk.
    """
    status = path.stat()
    return _unpacked(path.resolve(), (status.st_mtime_ns, status.st_size), unpack)


@lru_cache(maxsize=8)  # a command reads a model's weights and its tokenizer
def _unpacked(path: Path, version: tuple[int, int], unpack: Unpack) -> Path | None:
    place = cache_folder() / f"{_sha256(path)}-{transformers.__version__}-{LAYOUT}"
    if _is_whole(place):
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".staged-", dir=place.parent))
    except OSError:
        return None
    try:
        unpack(path, staged)
        hashes = {file.name: _sha256(file) for file in sorted(staged.iterdir())}
        (staged / MANIFEST).write_text(json.dumps(hashes, indent=1), encoding="utf-8")
        _put(staged, place)
    except Exception:  # a file from elsewhere: anything may be wrong with it
        return None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return place


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tether" / "gguf"


def _put(staged: Path, place: Path) -> None:
    """Another process may have been faster: what it put there is as good, if it is whole."""
    if place.exists():
        if _is_whole(place):
            return
        damaged = Path(tempfile.mkdtemp(prefix=".damaged-", dir=place.parent))
        os.replace(place, damaged / place.name)
        shutil.rmtree(damaged, ignore_errors=True)
    os.rename(staged, place)


def _is_whole(place: Path) -> bool:
    try:
        hashes = json.loads((place / MANIFEST).read_bytes())
        return bool(hashes) and all(
            _sha256(place / name) == found for name, found in hashes.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
