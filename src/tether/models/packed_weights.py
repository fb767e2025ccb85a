"""Weights in the order in which oneDNN reads them, for the many small products of a sampler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from tether.models.cpu_matmul import HAS_ONEDNN, OneDnnLinear
from tether.models.precision import Bfloat16Linear, WideLinear, uses_instructions
from tether.support.memory import allocated_bytes

MIN_PACKED_WEIGHTS = 2**16  # weights of a layer; smaller ones fit the processor's cache anyway
TYPICAL_ROWS = 64


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Let the large linear layers of a model on a CPU use packed weights meanwhile.

    They are float32, or bfloat16 where the layers compute in it. The layers' own weights stay as
    they are, and are used again afterwards.
    """
    layers = [m for m in model.modules() if _is_worth_packing(m) and _can_be_packed(m)]
    for layer in layers:
        cast(Any, layer).forward = _packed_forward(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def packed_bytes(model: nn.Module, device: str) -> int:
    """Return the memory of `packed_weights` beside a model's own weights, by kind of device."""
    if device != "cpu" or not HAS_ONEDNN:
        return 0
    layers = [module for module in model.modules() if _is_worth_packing(module)]
    sizes = (layer.weight.numel() * _packed_type(layer).itemsize for layer in layers)
    return sum(allocated_bytes(size, device) for size in sizes)


def _can_be_packed(layer: nn.Linear) -> bool:
    return layer.weight.device.type == "cpu" and HAS_ONEDNN


def _is_worth_packing(module: nn.Module) -> TypeGuard[nn.Linear]:
    if not isinstance(module, nn.Linear) or module.weight.numel() < MIN_PACKED_WEIGHTS:
        return False
    plain = type(module) in (nn.Linear, OneDnnLinear) and module.weight.dtype == torch.float32
    return plain or isinstance(module, Bfloat16Linear | WideLinear)


def _packed_type(layer: nn.Linear) -> torch.dtype:
    """Return the format in which the product is computed here."""
    in_bfloat16 = isinstance(layer, Bfloat16Linear) and uses_instructions(layer.weight)
    return torch.bfloat16 if in_bfloat16 else torch.float32


def _packed_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    # Operands and result are rounded to `rounded`; `computed` is what oneDNN multiplies.
    rounded = torch.bfloat16 if isinstance(layer, Bfloat16Linear) else torch.float32
    computed = _packed_type(layer)
    weight = layer.weight.detach().to(rounded).to(computed)
    weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    bias = None if layer.bias is None else layer.bias.detach().to(rounded).to(computed)

    def forward(states: Tensor) -> Tensor:
        states = states.to(rounded).to(computed)
        found = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
        return found.to(rounded)

    return forward
