"""LoRA by peft: a pair of thin matrices, B A, beside each frozen linear layer of a trunk.

The layers are replaced in place, so the model stays what it was to everyone else: the same class,
trunk and head. B starts at zero, so a fresh adapter changes no bit of the model's output.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tether.algo.random import uniform
from tether.config import LoraSection
from tether.errors import UserError
from tether.models.forward import trunk
from tether.support.memory import allocated_bytes

NAME = "default"  # peft's own; there is one adapter a model


def add_adapter(model: PreTrainedModel, lora: LoraSection, seed: int, role: str) -> None:
    """Freeze the model and put an adapter on its trunk: nothing else of it learns from now on.

    The head is left alone: where it is tied to the embedding, merging would change both.
    """
    insert_adapter(model, lora, role)
    for number, layer in enumerate(_layers(model)):
        _begin(layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, seed, role, number)


def insert_adapter(model: PreTrainedModel, lora: LoraSection, role: str) -> None:
    """An adapter with nothing in it yet, in float32 at least, as steps of a usual learning rate
    are lost in bfloat16."""
    from peft import LoraConfig, inject_adapter_in_model  # seconds, for those who use it

    network = trunk(model)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=_targets(network, lora.targets, role),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in network.modules()),
    )
    model.requires_grad_(False)
    inject_adapter_in_model(settings, network)
    model.eval()
    for layer in _layers(model):
        for weight in (layer.lora_A[NAME].weight, layer.lora_B[NAME].weight):
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model is its base, bit for bit."""
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
    """Inside, the model reads as one without adapter whose weights already have B A in them.

    The base weights are set aside and come back as they were: nothing is added and subtracted.
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
    """What `adapter_merged` takes beside the weights that it sets aside on a kind of device."""
    return sum(
        allocated_bytes(layer.get_base_layer().weight.nbytes, device) for layer in _layers(model)
    )


def merge_adapter(model: PreTrainedModel) -> None:
    """Add B A to the weights beside it and take the adapter out: a plain model is left."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_adapted(child):
                child.merge()
                setattr(parent, name, child.get_base_layer())


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if _is_adapted(module))


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A")


def _targets(network: nn.Module, names: list[str] | None, role: str) -> list[str]:
    """Full names of the linear layers that are meant by their last names."""
    linear = [name for name, module in network.named_modules() if _is_linear(module)]
    known = {name.rpartition(".")[2] for name in linear}
    for name in names or []:
        if name not in known:
            field = "model.lora" if role == "actor" else f"model.{role}_lora"
            raise UserError(
                f"{field}.targets names {name!r}, but the {role}'s linear layers are "
                f"{', '.join(sorted(known))}; choose among these."
            )
    return [name for name in linear if names is None or name.rpartition(".")[2] in names]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


@torch.no_grad()
def _begin(a: nn.Parameter, b: nn.Parameter, seed: int, role: str, number: int) -> None:
    """A uniform within ±1/sqrt(width), computed from the seed; B zero."""
    cells = uniform(seed, f"{role} adapter", number, np.arange(a.numel())).view_as(a)
    a.copy_((2 * cells - 1) / math.sqrt(a.shape[1]))
    b.zero_()
