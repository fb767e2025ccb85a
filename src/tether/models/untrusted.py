"""What a model directory may not ask for: code to fetch, weights that lie elsewhere, and sizes
that no model has."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tether.errors import UserError

INDEX = "model.safetensors.index.json"

# (smallest, largest, names in the config.json of one family or another). Building a model takes
# time and memory for each layer and label, even without weights; the largest models have 126
# layers, widths of 53,248 and 256,000 tokens.
SIZES = [
    (1, 1_000, ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")),
    (1, 10_000, ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads")),
    (0, 10_000, ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts")),
    (
        1,
        1_000_000,
        ("hidden_size", "intermediate_size", "n_embd", "d_model", "ffn_dim"),
    ),
    (1, 10_000_000, ("vocab_size", "num_labels")),
    (1, 1_000_000_000, ("max_position_embeddings", "n_positions", "n_ctx")),
]
LIMITS = {name: (low, high) for low, high, names in SIZES for name in names}


def refuse_untrusted(name: str, directory: Path) -> None:
    """Loading must read this directory's own files and run nothing that came with a model."""
    for kernel in _hub_kernels(_read(directory / "config.json")):
        raise UserError(
            f"{name} asks in its config.json for the attention or expert kernel {kernel!r}, code "
            f"that would be fetched and run; remove that line."
        )
    for field, value, (low, high) in _odd_sizes(_read(directory / "config.json")):
        raise UserError(
            f"{name} says {field} = {_short(value)} in its config.json; it must be a whole number "
            f"from {low:,} to {high:,}."
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


def _odd_sizes(config: Any) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """Sizes that are not whole numbers within their limits, also in a config's parts. Null is the
    family's own default, and a list has a number for each layer."""
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        yield from _odd_sizes(value)
        if key not in LIMITS or isinstance(value, dict):
            continue
        low, high = LIMITS[key]
        for size in value if isinstance(value, list) else [value]:
            if size is not None and (type(size) is not int or not low <= size <= high):
                yield key, size, (low, high)


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "2**200 …"
    return text if len(text) <= 60 else f"{text[:60]} …"


def _shards(index: Any) -> set[str]:
    weights = index.get("weight_map") if isinstance(index, dict) else None
    return set(map(str, weights.values())) if isinstance(weights, dict) else set()


def _read(path: Path) -> Any:
    """None if it is missing or no JSON: then loading itself says what is wrong."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
