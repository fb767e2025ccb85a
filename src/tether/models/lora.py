"""LoRA (Hu et al., arXiv 2106.09685) by peft: low-rank matrices B A beside frozen linear layers.

The layers of the trunk are replaced in place, so the model has the same class, trunk and head as
before. B starts at zero, so a fresh adapter does not change a bit of the model's output.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tether.algo.random import uniform
from tether.config import LoraSection
from tether.errors import UserError
from tether.models.forward import layer_stack, trunk
from tether.models.precision import compute_in, computed_in
from tether.support.memory import allocated_bytes

NAME = "default"  # peft's own; there is one adapter per model


def add_adapter(
    model: PreTrainedModel,
    lora: LoraSection,
    seed: int,
    role: str,
    layers: range | None = None,
    device: torch.device | None = None,
) -> None:
    """Freeze the model and put an adapter on its trunk, which alone learns from now on.

    The head gets none: where it is tied to the embedding, merging would change both. `layers` are
    the numbers of those that may learn (`model.learn_layers`), None for all; `device` is where the
    adapter of a model goes whose own weights are still in their files.
    """
    insert_adapter(model, lora, role, layers)
    for number, layer in enumerate(_layers(model)):
        for side in (layer.lora_A[NAME], layer.lora_B[NAME]):
            if side.weight.is_meta:  # as the weights below, which are still in their files
                side.weight = nn.Parameter(torch.empty_like(side.weight, device=device or "cpu"))
        _initialise(layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, seed, role, number)


def insert_adapter(
    model: PreTrainedModel, lora: LoraSection, role: str, layers: range | None = None
) -> None:
    """Put an uninitialised adapter on the trunk.

    It is float32 at least: in bfloat16, steps of a usual learning rate would be lost.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds to import

    network = trunk(model)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),  # peft divides by the rank, so a float works as well
        target_modules=_targets(network, lora.targets, role, layers),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in network.modules()),
    )
    model.requires_grad_(False)
    inject_adapter_in_model(settings, network)
    model.eval()
    for layer in _layers(model):
        for weight in (layer.lora_A[NAME].weight, layer.lora_B[NAME].weight):
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
    if computed_in(network) is not None:
        compute_in(network, "bfloat16")  # the adapter's layers too


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Turn the adapter off meanwhile: the model is its base, bit for bit."""
    layers = list(_layers(model))
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def adapter_merged(model: PreTrainedModel) -> Iterator[None]:
    """Merge the adapter into the weights meanwhile, so that a forward pass has no extra products.

    The base weights are set aside and restored: nothing is added and subtracted again.
    """
    layers = list(_layers(model))
    bases = [layer.get_base_layer().weight for layer in layers]
    aside = [weight.data for weight in bases]
    for layer, weight in zip(layers, bases, strict=True):
        delta = layer.get_delta_weight(NAME)
        weight.data = (weight.data + delta).to(weight.dtype)
    try:
        with adapter_off(model):
            yield
    finally:
        for weight, data in zip(bases, aside, strict=True):
            weight.data = data


def merged_bytes(model: PreTrainedModel, device: str) -> int:
    """Return the memory of `adapter_merged` beside the weights set aside, by kind of device."""
    return sum(
        allocated_bytes(layer.get_base_layer().weight.nbytes, device) for layer in _layers(model)
    )


def merge_adapter(model: PreTrainedModel) -> None:
    """Add B A to the base weights and remove the adapter, which leaves a plain model."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_adapted(child):
                child.merge()
                setattr(parent, name, child.get_base_layer())


def _layers(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if _is_adapted(module))


def _is_adapted(module: nn.Module) -> TypeGuard[Any]:
    return hasattr(module, "lora_A")


def _targets(
    network: nn.Module, names: list[str] | None, role: str, layers: range | None
) -> list[str]:
    """Return the full names of the linear layers that are chosen by the end of their names."""
    linear = {name: module for name, module in network.named_modules() if _is_linear(module)}
    known = {name.rpartition(".")[2] for name in linear}
    learning = set(network.modules())
    if layers is not None:
        stack = layer_stack(network)
        learning = {module for number in layers for module in stack[number].modules()}
    field = "model.lora" if role == "actor" else f"model.{role}_lora"
    for name in names or []:
        found = [module for full, module in linear.items() if _ends_with(full, name)]
        if not found:
            raise UserError(
                f"{field}.targets names {name!r}, but the {role}'s linear layers are "
                f"{', '.join(sorted(known))}; choose among these."
            )
        if not learning & set(found):
            raise UserError(
                f"{field}.targets names {name!r}, which model.learn_layers freezes; name linear "
                f"layers in layers {_numbers(layers)}."
            )
    return [
        full
        for full, module in linear.items()
        if module in learning and (names is None or any(_ends_with(full, n) for n in names))
    ]


def _ends_with(full: str, name: str) -> bool:
    """Tell whether `name` is one or more of the last words of a dotted name."""
    return f".{full}".endswith(f".{name}")


def _numbers(layers: range | None) -> str:
    return f"{layers[0]} to {layers[-1]}" if layers else ""


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


@torch.no_grad()
def _initialise(a: nn.Parameter, b: nn.Parameter, seed: int, role: str, number: int) -> None:
    """Fill A with uniform numbers within ±1/sqrt(width), computed from the seed, and B with 0."""
    cells = uniform(seed, f"{role} adapter", number, np.arange(a.numel())).view_as(a)
    a.copy_((2 * cells - 1) / math.sqrt(a.shape[1]))
    b.zero_()
