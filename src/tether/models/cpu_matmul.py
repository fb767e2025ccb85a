"""Float32 matrix products on a CPU by oneDNN, which torch ships but does not use by itself.

torch uses MKL for float32, which on processors that are not Intel's is slower: by a tenth in a
layer, by a third in the product with a whole vocabulary.
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard, cast

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
    """Return a b^T + bias, without gradients."""
    if not uses_onednn(a, b):
        return linear(a, b, bias)
    return torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b), bias, "none", [], "")


def use_onednn(model: nn.Module) -> None:
    """Let the model's plain linear layers multiply by oneDNN, in backward passes too."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


class OneDnnLinear(nn.Linear):
    """An nn.Linear that multiplies by oneDNN."""

    def forward(self, input: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows columns"]:
        """Return input weight^T + bias."""
        if uses_onednn(input, self.weight):
            return cast(Tensor, OneDnnMatmul.apply(input, self.weight, self.bias))
        return super().forward(input)


class OneDnnMatmul(torch.autograd.Function):
    """a b^T + bias with gradients, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """Return a b^T + bias."""
        ctx.save_for_backward(a, b)
        return matmul_transposed(a, b, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        """Return the gradients of a, b and bias."""
        (gradient,) = grad_outputs
        a, b = ctx.saved_tensors
        needs_a, needs_b, needs_bias = ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        return (
            OneDnnMatmul.apply(gradient, b.T, None) if needs_a else None,
            flat.T @ a.flatten(0, -2) if needs_b else None,  # here MKL is as fast
            flat.sum(dim=0) if needs_bias else None,
        )


def uses_onednn(a: Tensor, b: Tensor) -> bool:
    """Tell whether oneDNN multiplies these two, and faster than MKL."""
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
    """Return the matrix without gaps in memory; oneDNN is slow on strided ones."""
    if matrix.is_contiguous() or (matrix.ndim == 2 and matrix.t().is_contiguous()):
        return matrix
    return matrix.contiguous()


PLAIN_TENSORS = (Tensor, nn.Parameter)  # not DTensor
HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")


MIN_PACKED_WEIGHTS = 2**16  # weights of a layer; smaller ones fit the processor's cache anyway
TYPICAL_ROWS = 64


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Let the large linear layers of a float32 model on a CPU use packed weights meanwhile.

    The layers' own weights stay as they are, and are used again afterwards.
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
    return sum(allocated_bytes(layer.weight.nbytes, device) for layer in layers)


def _can_be_packed(layer: nn.Linear) -> bool:
    return layer.weight.device.type == "cpu" and HAS_ONEDNN


def _is_worth_packing(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        isinstance(module, nn.Linear)
        and type(module) in (nn.Linear, OneDnnLinear)
        and module.weight.numel() >= MIN_PACKED_WEIGHTS
        and module.weight.dtype == torch.float32
    )


def _packed_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), TYPICAL_ROWS)
    bias = None if layer.bias is None else layer.bias.detach()

    def forward(states: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")

    return forward
