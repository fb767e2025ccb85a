"""Float32 matrix products on a CPU by oneDNN, which torch ships but does not use by itself.

torch uses MKL for float32, which on processors that are not Intel's is slower: by a tenth in a
layer, by a third in the product with a whole vocabulary. On Intel's it is faster by a tenth.
"""

import platform
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from tether.support.processor import INTEL, maker

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
        FASTER_THAN_MKL
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
FASTER_THAN_MKL = HAS_ONEDNN and maker() != INTEL
