"""What a run is made from besides its config: if that changes, it is another run."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch

from tether import assets
from tether.config import Config

ENDS = 1 << 20  # bytes at each end of a weight file that are looked at


def fingerprint(config: Config) -> dict[str, str]:
    """A hash a file that the run reads, and the torch that computes, by config field."""
    found = {name: _hash_file(path) for name, path in _files(config)}
    for name in ("actor", "reference", "critic"):
        model = getattr(config.model, name)
        if model is not None:
            found[f"model.{name}"] = _hash_model(assets.resolve(model))
    return {**found, "torch": str(torch.__version__)}


def _files(config: Config) -> Iterator[tuple[str, Path]]:
    yield "data.train", assets.resolve(config.data.train)
    if config.data.heldout is not None:
        yield "data.heldout", assets.resolve(config.data.heldout)
    path, colon, _ = config.reward.kind.rpartition(":")
    if colon:
        yield "reward.kind", Path(path)


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"


def _hash_model(directory: Path) -> str:
    """Names, sizes, and both ends of each file: weights may be many gigabytes."""
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(directory)} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(ENDS))
            file.seek(max(0, size - ENDS))
            digest.update(file.read(ENDS))
    return digest.hexdigest()
