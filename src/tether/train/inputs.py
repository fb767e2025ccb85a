"""What a run is made from besides its config: if that changes, it is another run."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch

from tether import assets
from tether.config import Config, OwnTool, SearchTool
from tether.models.loading import find_model
from tether.rewards.parts import learned_model, parts_of

ENDS = 1 << 20  # bytes at each end of a weight file that are looked at


def fingerprint(config: Config) -> dict[str, str]:
    """A hash a file that the run reads, and the torch that computes, by config field."""
    found = {name: _hash_file(path) for name, path in _files(config)}
    for name in ("actor", "reference", "critic"):
        model = getattr(config.model, name)
        if model is not None:
            found[f"model.{name}"] = hash_model(find_model(model, config.model.hub))
    reward = learned_model(config.reward)
    if reward is not None:
        found["reward.kind"] = hash_model(find_model(reward))
    return {**found, "torch": str(torch.__version__)}


def _files(config: Config) -> Iterator[tuple[str, Path]]:
    for split in ("train", "heldout"):
        files = config.data.files(split)
        for number, file in enumerate(files):
            which = "" if len(files) == 1 else f"[{number}]"
            yield f"data.{split}{which}", assets.resolve(file.path)
    for number, tool in enumerate(config.rollout.tools):
        if isinstance(tool, SearchTool) and tool.corpus is not None:
            yield f"rollout.tools[{number}].corpus", assets.resolve(tool.corpus)
        elif isinstance(tool, OwnTool):
            yield f"rollout.tools[{number}]", Path(tool.kind.rpartition(":")[0])
    if config.rollout.environment is not None:
        yield "rollout.environment", Path(config.rollout.environment.rpartition(":")[0])
    for part in parts_of(config.reward):
        path, colon, _ = part.kind.rpartition(":")
        if colon and part.model is None:
            field = "reward.kind" if part.name is None else f"reward.parts, {part.name}"
            yield field, Path(path)


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"


def hash_model(model: Path) -> str:
    """Names, sizes, and both ends of each file: weights may be many gigabytes."""
    digest = hashlib.sha256()
    files = [model] if model.is_file() else [p for p in model.rglob("*") if p.is_file()]
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(model)} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(ENDS))
            file.seek(max(0, size - ENDS))
            digest.update(file.read(ENDS))
    return digest.hexdigest()
