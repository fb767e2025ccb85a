"""Float32 matrix products by oneDNN, which torch has on board and uses only when told to.

Its own choice for float32 is MKL, whose kernels for other makers' processors are slower: by a
tenth in a layer, by a third where a state meets a whole vocabulary.
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from tether.support.memory import allocated_bytes

MIN_WEIGHTS = 2**16  # weights of a matrix; for smaller ones the call costs more than it gains


def matmul_transposed(
    a: Float[Tensor, "*rows width"],
    b: Float[Tensor, "columns width"],
    bias: Float[Tensor, " columns"] | None = None,
) -> Float[Tensor, "*rows columns"]:
    """a b^T + bias, for where no gradient is asked for."""
    if not uses_onednn(a, b):
        return linear(a, b, bias)
    return torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b), bias, "none", [], "")


def use_onednn(model: nn.Module) -> None:
    """Let the model's plain linear layers multiply by `OneDnnMatmul`, gradients included."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


class OneDnnLinear(nn.Linear):
    """nn.Linear, the same in everything but who multiplies."""

    def forward(self, states: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows columns"]:
        if uses_onednn(states, self.weight):
            return OneDnnMatmul.apply(states, self.weight, self.bias)
        return super().forward(states)


class OneDnnMatmul(torch.autograd.Function):
    """a b^T + bias with gradients, and theirs in turn."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        return matmul_transposed(a, b, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        needs_a, needs_b, needs_bias = ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        return (
            OneDnnMatmul.apply(gradient, b.T, None) if needs_a else None,
            flat.T @ a.flatten(0, -2) if needs_b else None,  # here MKL is as fast
            flat.sum(dim=0) if needs_bias else None,
        )


def uses_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether these two are a case for oneDNN."""
    return (
        HAS_ONEDNN
        and a.device.type == "cpu"
        and a.dtype == b.dtype == torch.float32
        and b.numel() >= MIN_WEIGHTS
        and a.numel() > 0
        and type(a) in PLAIN_TENSORS
        and type(b) in PLAIN_TENSORS
    )


def _dense(matrix: Tensor) -> Tensor:
    """Without gaps, whichever way round: what has gaps oneDNN multiplies number by number."""
    if matrix.is_contiguous() or (matrix.ndim == 2 and matrix.t().is_contiguous()):
        return matrix
    return matrix.contiguous()


PLAIN_TENSORS = (Tensor, nn.Parameter)  # and no part of a tensor that several processes hold
HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")


MIN_PACKED_WEIGHTS = 2**16  # weights of a layer; smaller ones stay in the processor's cache anyway
TYPICAL_ROWS = 64


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
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
    """What `packed_weights` takes beside a model's own weights on a kind of device."""
    if device != "cpu" or not HAS_ONEDNN:
        return 0
    layers = [module for module in model.modules() if _is_worth_packing(module)]
    return sum(allocated_bytes(layer.weight.nbytes, device) for layer in layers)


def _can_be_packed(module: nn.Module) -> bool:
    return _is_worth_packing(module) and module.weight.device.type == "cpu" and HAS_ONEDNN


def _is_worth_packing(module: nn.Module) -> bool:
    return (
        type(module) in (nn.Linear, OneDnnLinear)
        and module.weight.numel() >= MIN_PACKED_WEIGHTS
        and module.weight.dtype == torch.float32
    )


def _reader(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), TYPICAL_ROWS)
    bias = None if layer.bias is None else layer.bias.detach()

    def read(states: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")

    return read
