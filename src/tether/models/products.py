"""Float32 matrix products by oneDNN, which torch has on board and uses only when told to.

Its own choice for float32 is MKL, whose kernels for other makers' processors are slower: by a
tenth in a layer, by a third where a state meets a whole vocabulary.
"""

import platform

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

WORTH_IT = 2**16  # weights of a matrix; for smaller ones the call costs more than it gains


def product(
    a: Float[Tensor, "*rows width"],
    b: Float[Tensor, "columns width"],
    bias: Float[Tensor, " columns"] | None = None,
) -> Float[Tensor, "*rows columns"]:
    """a b^T + bias, for where no gradient is asked for."""
    if not by_onednn(a, b):
        return linear(a, b, bias)
    return torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b), bias, "none", [], "")


def by_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether these two are a case for oneDNN."""
    return (
        ON_BOARD
        and a.device.type == "cpu"
        and a.dtype == b.dtype == torch.float32
        and b.numel() >= WORTH_IT
        and a.numel() > 0
    )


def _dense(matrix: Tensor) -> Tensor:
    """Without gaps, whichever way round: what has gaps oneDNN multiplies number by number."""
    if matrix.is_contiguous() or (matrix.ndim == 2 and matrix.t().is_contiguous()):
        return matrix
    return matrix.contiguous()


ON_BOARD = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")
