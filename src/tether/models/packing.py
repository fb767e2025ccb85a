"""Weights laid out as the processor multiplies them, for the length of a rollout.

A matrix product first copies its matrix into the order in which it reads it. In training that is
a small part of the work; a sampler reads the same weights at every token, for few rows. So they
are put in order once, with the operators that torch's own compiler uses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tether.models.heap import taken
from tether.models.products import ON_BOARD, OneDnnLinear

WORTH_PACKING = 2**16  # weights of a layer; smaller ones stay in the processor's cache anyway
TYPICAL_ROWS = 64


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Inside, the large linear layers of a float32 model on a CPU read packed weights.

    Their own weights are untouched, and read again afterwards.
    """
    layers = [module for module in model.modules() if _can_be_packed(module)]
    for layer in layers:
        layer.forward = _reader(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def packed_bytes(model: nn.Module, device: str) -> int:
    """What `packed` takes beside a model's own weights on a kind of device."""
    if device != "cpu" or not ON_BOARD:
        return 0
    layers = [module for module in model.modules() if _is_worth_packing(module)]
    return sum(taken(layer.weight.nbytes, device) for layer in layers)


def _can_be_packed(module: nn.Module) -> bool:
    return _is_worth_packing(module) and module.weight.device.type == "cpu" and ON_BOARD


def _is_worth_packing(module: nn.Module) -> bool:
    return (
        type(module) in (nn.Linear, OneDnnLinear)
        and module.weight.numel() >= WORTH_PACKING
        and module.weight.dtype == torch.float32
    )


def _reader(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), TYPICAL_ROWS)
    bias = None if layer.bias is None else layer.bias.detach()

    def read(states: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")

    return read
