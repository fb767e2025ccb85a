"""Weights in the order in which oneDNN reads them, for the many small products of a sampler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tether.models.cpu_matmul import HAS_ONEDNN, OneDnnLinear
from tether.models.precision import Bfloat16Linear, WideLinear, uses_instructions
from tether.support.memory import allocated_bytes

Product = Callable[[Tensor], Tensor]

MIN_PACKED_WEIGHTS = 2**16  # weights of a matrix; smaller ones fit the processor's cache anyway
TYPICAL_ROWS = 64


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Let the large linear layers of a model on a CPU use packed weights meanwhile.

    They are float32, or bfloat16 where the layers compute in it. The layers' own weights stay as
    they are, and are used again afterwards.
    """
    layers = [m for m in model.modules() if _is_worth_packing(m) and can_be_packed(m)]
    for layer in layers:
        cast(Any, layer).forward = packed_product(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def packed_bytes(model: nn.Module, device: str) -> int:
    """Return the memory of a sampler's packed weights beside a model's own, by kind of device."""
    if device != "cpu" or not HAS_ONEDNN:
        return 0
    layers = [module for module in model.modules() if _is_worth_packing(module)]
    sizes = (layer.weight.numel() * _packed_type(layer).itemsize for layer in layers)
    return sum(allocated_bytes(size, device) for size in sizes)


def can_be_packed(module: nn.Module) -> bool:
    """Tell whether the module's products are oneDNN's to compute."""
    return HAS_ONEDNN and next(module.parameters()).device.type == "cpu"


def packed_product(*layers: nn.Module) -> Product:
    """Return the map of states to the results of linear layers, side by side, without gradients.

    Layers with an adapter count as their base layers: the adapter is to be merged.
    """
    found = [cast(Any, layer) for layer in layers]
    plain: list[nn.Linear] = [getattr(layer, "base_layer", layer) for layer in found]
    # Operands and result are rounded to `rounded`; `computed` is what is multiplied.
    rounded, computed = _result_type(plain[0]), _packed_type(plain[0])

    def side_by_side(parts: list[Tensor]) -> Tensor:
        parts = [part.detach().to(rounded).to(computed) for part in parts]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    weight, bias = side_by_side([layer.weight for layer in plain]), None
    if any(layer.bias is not None for layer in plain):
        bias = side_by_side([_zeros(p) if p.bias is None else p.bias for p in plain])
    packable = computed == torch.float32 or isinstance(plain[0], Bfloat16Linear)
    if weight.numel() < MIN_PACKED_WEIGHTS or not packable:
        return lambda states: linear(states.to(rounded).to(computed), weight, bias).to(rounded)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)

    def product(states: Tensor) -> Tensor:
        states = states.to(rounded).to(computed)
        found = torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")
        return found.to(rounded)

    return product


def _is_worth_packing(module: nn.Module) -> TypeGuard[nn.Linear]:
    if not isinstance(module, nn.Linear) or module.weight.numel() < MIN_PACKED_WEIGHTS:
        return False
    plain = type(module) in (nn.Linear, OneDnnLinear) and module.weight.dtype == torch.float32
    return plain or isinstance(module, Bfloat16Linear | WideLinear)


def _result_type(layer: nn.Linear) -> torch.dtype:
    if isinstance(layer, Bfloat16Linear):
        return torch.bfloat16
    return torch.float32 if isinstance(layer, WideLinear) else layer.weight.dtype


def _packed_type(layer: nn.Linear) -> torch.dtype:
    """Return the format in which the product is computed here."""
    if isinstance(layer, Bfloat16Linear):
        return torch.bfloat16 if uses_instructions(layer.weight) else torch.float32
    return _result_type(layer)


def _zeros(layer: nn.Linear) -> Tensor:
    return layer.weight.new_zeros(layer.out_features)
