"""Weights that stay in their safetensors files until a process knows which part of them is its own.

A model is built on `meta`: shapes without numbers. Every module with weights holds beside them
where they lie in the files (`Place`), which copies, adapters and sharding leave in peace. Once the
model is sharded each process reads its own rows and columns, and no other.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.dist.collectives import gather
from tether.dist.dtensor import as_dtensor, local_shard, own_slices
from tether.errors import UserError
from tether.models.untrusted import INDEX, WEIGHTS, spellings

PLACES = "places_of_weights"  # an attribute of modules: of each weight by its name there


@dataclass(frozen=True)
class Place:
    """A tensor in a safetensors file."""

    file: Path
    name: str

    def read(self, part: tuple[slice, ...] = (slice(None),)) -> Tensor:
        """Read a part of it: a view of the file, of which nothing is in memory before its use.

        The file is opened anew each time, so that what was read can leave memory.
        """
        with safe_open(self.file, "pt") as opened:
            return opened.get_slice(self.name)[part]


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name, each read from its place when it is asked for."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = places

    def __getitem__(self, name: str) -> Tensor:
        place = self.places[name]
        with safe_open(place.file, "pt") as opened:
            return opened.get_tensor(place.name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def stored_tensors(*files: Path) -> StoredTensors:
    """Return the tensors of some files; only their headers are read."""
    places = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            places |= {name: Place(file, name) for name in opened.keys()}  # noqa: SIM118
    return StoredTensors(places)


def is_unread(module: nn.Module) -> bool:
    """Tell whether there are weights that have not been read yet."""
    return any(local_shard(weight).is_meta for weight in module.parameters())


def note_places(model: PreTrainedModel, directory: Path, device: torch.device) -> bool:
    """Note where the weights of a model on `meta` lie in a directory; compute its buffers.

    False, and the model is of no use, where some lie nowhere under their own name and shape.
    """
    stored = stored_tensors(*_weight_files(directory)).places
    found, names, prefix = {}, {}, model.base_model_prefix
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    for weight in model.parameters():
        held = {key for alias in names[id(weight)] for key in spellings(alias, prefix)}
        places = [stored[key] for key in held if key in stored]
        if len(places) != 1 or _shape(places[0]) != weight.shape:
            return False
        found[id(weight)] = places[0]
    if not (_ties_as_told(model) and _compute_buffers(model, device)):
        return False
    for module in model.modules():
        own = {k: found[id(w)] for k, w in module._parameters.items() if w is not None}
        if own:
            vars(module)[PLACES] = own
    return True


def weights_by_name(model: nn.Module) -> Mapping[str, Tensor]:
    """Return a model's weights; those of an unread one are read when they are asked for."""
    if not is_unread(model):
        return model.state_dict()
    places = {}
    for name, _ in model.named_parameters():
        owner, _, key = name.rpartition(".")
        places[name] = vars(model.get_submodule(owner))[PLACES][key]
    return StoredTensors(places)


@torch.no_grad()
def read_own_parts(root: nn.Module, device: torch.device) -> None:
    """Read what this process has of a sharded module's weights; those with numbers keep them.

    All processes refuse weights that are not finite, whichever finds them.
    """
    odd = ""
    for module in root.modules():
        for key, weight in module._parameters.items():
            if weight is None or not local_shard(weight).is_meta:
                continue
            place: Place = vars(module)[PLACES][key]
            own = torch.empty_like(local_shard(weight), device=device)
            own.copy_(place.read(own_slices(weight)))
            if not bool(own.isfinite().all()):
                odd = odd or f"{place.name} in {place.file}"
            read = nn.Parameter(as_dtensor(own, weight), weight.requires_grad)
            torch.utils.swap_tensors(weight, read)  # in every place of a tied one
    for where in filter(None, gather(odd)):
        raise UserError(f"{where} holds NaN or infinite weights; the model cannot be used.")


def _weight_files(directory: Path) -> list[Path]:
    """Return the files that transformers reads: one, or those of the index."""
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    index = json.loads((directory / INDEX).read_bytes())
    return [directory / file for file in sorted(set(index["weight_map"].values()))]


def _shape(place: Place) -> torch.Size:
    with safe_open(place.file, "pt") as opened:
        return torch.Size(opened.get_slice(place.name).get_shape())


def _ties_as_told(model: PreTrainedModel) -> bool:
    """Tell whether all weights are tied that the config ties; those that are stored twice are
    only if they are equal, which has not been looked at."""
    tied = model.all_tied_weights_keys.items()
    return all(model.get_parameter(a) is model.get_parameter(b) for a, b in tied)


def _compute_buffers(model: PreTrainedModel, device: torch.device) -> bool:
    """Compute the buffers, as transformers does after loading; False if one is left."""
    held = [(module, key) for module in model.modules() for key in _buffers(module)]
    if any(key not in module._non_persistent_buffers_set for module, key in held):
        return False  # they are stored
    for module, key in held:
        buffer = module._buffers[key]
        if buffer is None or not buffer.is_floating_point():
            return False
        module._buffers[key] = torch.full_like(buffer, torch.nan, device="cpu")
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)
    model.initialize_weights()
    for module, key in held:
        buffer = module._buffers[key]
        if buffer is None or bool(buffer.isnan().any()):
            return False
        module._buffers[key] = buffer.to(device)
    return True


def _buffers(module: nn.Module) -> list[str]:
    return [key for key, buffer in module._buffers.items() if buffer is not None]
