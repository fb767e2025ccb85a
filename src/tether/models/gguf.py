"""GGUF files, unpacked once into a Hugging Face directory in the user's cache.

Unpacking takes a minute for a model of 135M parameters, so the result is cached under the SHA-256
of the file and the version of transformers that unpacked it. It is written beside its final place
and renamed, with a SHA-256 of each of its files; one that no longer matches is unpacked again.
"""

import hashlib
import io
import json
import os
import shutil
import tempfile
from contextlib import redirect_stderr
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tether.errors import UserError
from tether.models.saving import save_tokenizer

LAYOUT = 1  # of the cached files; another number is another place
MANIFEST = "manifest.json"


def transformers_source(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return what `from_pretrained` takes for a model: its directory, and options.

    A GGUF that cannot be unpacked into the cache is passed to transformers as it is.
    """
    if path.is_dir():
        return path, {}
    if find_spec("gguf") is None:
        raise UserError(f"{path} can be read with the gguf package only: pip install gguf.")
    status = path.stat()
    cached = _unpacked(path.resolve(), (status.st_mtime_ns, status.st_size))
    return (path.parent, {"gguf_file": path.name}) if cached is None else (cached, {})


def dequantized() -> dict[str, Any]:
    """Return options that unpack a GGUF's weights: newer transformers may leave them packed."""
    settings = getattr(transformers, "GgufConfig", None)
    return {} if settings is None else {"quantization_config": settings(dequantize=True)}


def make_savable(model: PreTrainedModel) -> None:
    """Let a model be saved that has settings for sampling beside `do_sample: false`.

    transformers loads these, but would refuse to save them again.
    """
    generation = model.generation_config
    if generation is None:
        return
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True


@lru_cache(maxsize=8)  # a command reads a model's weights and its tokenizer
def _unpacked(path: Path, version: tuple[int, int]) -> Path | None:
    """Return the directory that the file was unpacked into, now or earlier.

    None if unpacking failed, or nothing can be written, as on a full disk.
    """
    place = cache_folder() / f"{_sha256(path)}-{transformers.__version__}-{LAYOUT}"
    if _is_whole(place):
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".staged-", dir=place.parent))
    except OSError:
        return None
    try:
        _unpack(path, staged)
        hashes = {file.name: _sha256(file) for file in sorted(staged.iterdir())}
        (staged / MANIFEST).write_text(json.dumps(hashes, indent=1), encoding="utf-8")
        _put(staged, place)
    except Exception:  # a file from elsewhere: anything may be wrong with it
        return None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return place


def _unpack(path: Path, folder: Path) -> None:
    """Write a GGUF's model and tokenizer as a Hugging Face directory, weights in float32."""
    source: dict[str, Any] = {
        "local_files_only": True,
        "trust_remote_code": False,
        "gguf_file": path.name,
    }
    auto: Any = AutoModelForCausalLM
    with redirect_stderr(io.StringIO()):
        model, info = auto.from_pretrained(
            path.parent, dtype=torch.float32, output_loading_info=True, **source, **dequantized()
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
    if info["missing_keys"]:
        raise ValueError(min(info["missing_keys"]))
    if getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer.remove_quantization_config(model)
    make_savable(model)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def cache_folder() -> Path:
    """Return where unpacked models are cached."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tether" / "gguf"


def _put(staged: Path, place: Path) -> None:
    """Move a directory into place, unless another process was faster and its copy is whole."""
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
