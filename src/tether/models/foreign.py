"""What a model directory may not ask for: code to fetch, and weights that lie elsewhere."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tether.errors import UserError

INDEX = "model.safetensors.index.json"


def refuse_foreign(name: str, directory: Path) -> None:
    """Loading must read this directory's own files and run nothing that came with a model."""
    for kernel in _hub_kernels(_read(directory / "config.json")):
        raise UserError(
            f"{name} asks in its config.json for the attention or expert kernel {kernel!r}, code "
            f"that would be fetched and run; remove that line."
        )
    for shard in _shards(_read(directory / INDEX)):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise UserError(
                f"{name} names {shard!r} in {INDEX}; weights must be .safetensors files in the "
                f"same directory."
            )


def _hub_kernels(config: Any) -> Iterator[str]:
    """Implementations named like hub repositories, also in a config's parts."""
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        if key.endswith("_implementation") or key.endswith("_implementation_internal"):
            names = value.values() if isinstance(value, dict) else [value]
            yield from (text for text in names if isinstance(text, str) and "/" in text)
        else:
            yield from _hub_kernels(value)


def _shards(index: Any) -> set[str]:
    weights = index.get("weight_map") if isinstance(index, dict) else None
    return set(map(str, weights.values())) if isinstance(weights, dict) else set()


def _read(path: Path) -> Any:
    """None if it is missing or no JSON: then loading itself says what is wrong."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
