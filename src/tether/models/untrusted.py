"""Refusals of model directories: their code, pickles, weights outside them, absurd sizes."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from tether.errors import UserError, one_line

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOATS = ("F64", "F32", "F16", "BF16")  # what safetensors calls them
MAX_PROMISED_RATIO = 16  # weights per number in a file: packed ones hold up to 8
MAX_MISSING = 100_000_000  # weights that the files may lack, such as a new head's

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
    """Refuse a config.json or an index that reaches beyond the directory's own files.

    It may name kernels to download and run, weights elsewhere, or sizes that no model has.
    """
    config = _read(directory / CONFIG)
    for kernel in _hub_kernels(config):
        raise UserError(
            f"{name} asks in its config.json for the attention or expert kernel {kernel!r}, code "
            f"that would be fetched and run; remove that line."
        )
    for field, value, (low, high) in _odd_sizes(config):
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


def refuse_pickle(name: str, directory: Path) -> None:
    """Refuse weights that are only there as pickles, which can run code when they are opened."""
    if any(directory.glob("*.safetensors")):
        return
    for pattern in PICKLES:
        for found in directory.glob(pattern):
            raise UserError(
                f"{name} keeps its weights in {found.name}, a pickle, which can run code when "
                f"opened; convert it to safetensors first."
            )


def refuse_other_weights(name: str, directory: Path, outline: nn.Module) -> None:
    """Refuse files that do not hold the weights which config.json promises, as floats.

    `outline` is the model that config.json describes, without its weights. transformers would
    make up what is missing, in memory that was never planned for.
    """
    _refuse_absent_files(name, directory)
    files = list(directory.glob("*.safetensors"))
    held = sum(_count_weights(file) for file in files)
    weights = dict(outline.named_parameters())
    promised = sum(weight.numel() for weight in weights.values())
    prefix = getattr(outline, "base_model_prefix", "")
    for file in files:
        _refuse_other_numbers(name, file, weights)
    if promised > MAX_MISSING + MAX_PROMISED_RATIO * held:
        raise UserError(
            f"{name} has {promised:,} weights by its config.json, but its files hold {held:,}; it "
            f"is incomplete, or its config.json belongs to another model."
        )
    for file in files:
        _refuse_other_shapes(name, file, weights, prefix)


def refuse_remote_code(name: str, error: Exception) -> None:
    """Refuse a directory that transformers would load only with code that came with it."""
    if "trust_remote_code" in str(error):
        raise UserError(
            f"{name} comes with Python code of its own, which tether never runs; choose a model "
            f"whose architecture is part of transformers."
        ) from None


@contextmanager
def explain_load_errors(name: str, kind: str) -> Iterator[None]:
    """Turn what transformers raises over a model into one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # over a config.json of any content transformers may raise anything
        refuse_remote_code(name, error)
        raise UserError(f"{name} does not load as {kind}: {one_line(error)}") from None


def _refuse_other_numbers(name: str, file: Path, weights: Iterable[str]) -> None:
    """Refuse weights stored as integers or in 8 bits: they need a scale that is not applied here.

    Buffers may be of any type. A trunk's names may lack their prefix, or have one too many.
    """
    with safe_open(file, "pt") as opened:
        kinds = {tensor: opened.get_slice(tensor).get_dtype() for tensor in opened.keys()}  # noqa: SIM118
    for tensor, kind in kinds.items():
        if kind not in FLOATS and any(_same_weight(tensor, weight) for weight in weights):
            raise UserError(
                f"{name} stores {tensor} as {kind} in {file.name}, not as a float; convert its "
                f"weights to float32, float16 or bfloat16 first."
            )


def _refuse_absent_files(name: str, directory: Path) -> None:
    if (directory / WEIGHTS).is_file():  # transformers prefers it to the index
        return
    for shard in sorted(_shards(_read(directory / INDEX))):
        if not (directory / shard).is_file():
            raise UserError(
                f"{name} names {shard!r} in {INDEX}, which is not there; fetch the model's files "
                f"again."
            )


def _refuse_other_shapes(name: str, file: Path, weights: Mapping[str, Tensor], prefix: str) -> None:
    """Refuse a tensor that is not as large as the weight of its name, with the prefix or without.

    Other names are left to transformers, which may put such weights together.
    """
    for tensor, found in _shapes(file).items():
        for spelt in spellings(tensor, prefix):
            if spelt in weights and tuple(weights[spelt].shape) != found:
                raise UserError(
                    f"{name} stores {tensor} as {_by(found)} in {file.name}, where its "
                    f"config.json asks for {_by(weights[spelt].shape)}; it is damaged, or its "
                    f"config.json belongs to another model."
                )


def spellings(name: str, prefix: str) -> set[str]:
    """Return the names that files may have for a weight: with the trunk's prefix, or without."""
    return {name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"}


def _by(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _same_weight(a: str, b: str) -> bool:
    return f".{a}".endswith(f".{b}") or f".{b}".endswith(f".{a}")


def _count_weights(file: Path) -> int:
    return sum(map(math.prod, _shapes(file).values()))


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, "pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def _hub_kernels(config: Any) -> Iterator[str]:
    """Yield implementations named like hub repositories, also in a config's parts."""
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        if key.endswith("_implementation") or key.endswith("_implementation_internal"):
            names = value.values() if isinstance(value, dict) else [value]
            yield from (text for text in names if isinstance(text, str) and "/" in text)
        else:
            yield from _hub_kernels(value)


def _odd_sizes(config: Any) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """Yield sizes that are not whole numbers within their limits, also in a config's parts.

    Null is the family's own default, and a list has a number for each layer.
    """
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
    """Read JSON; None if it is missing or broken, which loading itself explains."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
