"""Named tensors in safetensors files: one file, or a part from each process that saves."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.data.batching import balance
from tether.dist.dtensor import full_tensor
from tether.dist.world import world
from tether.models.saving import save_tokenizer
from tether.models.stored import StoredTensors, stored_tensors


@dataclass(frozen=True)
class OwnTensors:
    """The full tensors that this process writes, and which process writes which."""

    tensors: Mapping[str, Tensor]
    writers: Mapping[str, int]
    total_bytes: int


def own_tensors(named: Mapping[str, Tensor]) -> OwnTensors:
    """Return this process's share of the tensors, about equal in bytes. All processes gather what
    is sharded, one tensor at a time, and keep only their own. Which process writes which follows
    from the names, in any order."""
    here, names = world(), sorted(named)
    sizes = [named[name].numel() * named[name].element_size() for name in names]
    writers = {
        names[i]: writer for writer, share in enumerate(balance(sizes, here.size)) for i in share
    }
    own = {}
    for name in names:
        full = full_tensor(named[name])
        if writers[name] == here.rank:
            own[name] = full
    return OwnTensors(own, writers, sum(sizes))


def write_tensors(file: Path, own: OwnTensors) -> Path:
    """Write this process's tensors, and return the file that they are in."""
    here = world()
    path = file if here.size == 1 else _part(file, here.rank, here.size)
    save_file({name: tensor.contiguous() for name, tensor in own.tensors.items()}, path)
    return path


def read_tensors(file: Path) -> StoredTensors:
    """Return the tensors of one file, or of the parts in its place, each read when it is asked for.

    What a process does not use of a tensor, as it has a shard of it, takes no memory.
    """
    if file.is_file():
        return stored_tensors(file)
    found = sorted(file.parent.glob(f"{file.stem}-*-of-*{file.suffix}"))
    if not found or len(found) != int(found[0].stem.rpartition("-")[2]):
        raise OSError(f"{file.name} is missing or not complete")
    return stored_tensors(*found)


def write_model(
    folder: Path, own: OwnTensors, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[Path]:
    """Write a Hugging Face directory, in parts with an index where several processes write it.

    Return the files that this process has written.
    """
    here = world()
    if here.size == 1:
        model.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
        return sorted(path for path in folder.rglob("*") if path.is_file())
    folder.mkdir(exist_ok=True)
    file = folder / "model.safetensors"
    part = _part(file, here.rank, here.size)
    tensors = {name: tensor.contiguous() for name, tensor in own.tensors.items()}
    save_file(tensors, part, metadata={"format": "pt"})
    return [part, *_write_rest(file, own, model, tokenizer)] if here.is_first else [part]


def _write_rest(
    file: Path, own: OwnTensors, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[Path]:
    """Write what is no tensor beside the parts of `file`, and return the files.

    They are made in a folder of their own: in the model's, other processes are still writing.
    """
    places = {name: _part(file, writer, world().size).name for name, writer in own.writers.items()}
    index = {"metadata": {"total_size": own.total_bytes}, "weight_map": places}
    written = []
    with TemporaryDirectory(prefix=".made-", dir=file.parent.parent) as made:
        folder = Path(made)
        (folder / f"{file.name}.index.json").write_text(json.dumps(index, indent=1), "utf-8")
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            place = file.parent / path.relative_to(folder)
            place.parent.mkdir(exist_ok=True)
            written.append(path.replace(place))
    return written


def _part(file: Path, writer: int, writers: int) -> Path:
    return file.with_name(f"{file.stem}-{writer + 1:05d}-of-{writers:05d}{file.suffix}")
