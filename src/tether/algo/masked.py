"""Sums, means and moments over the True cells of a mask."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.types import Moments

EPSILON = 1e-8


def masked_sum(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    # where() and not a product: a NaN in a masked cell must not survive 0 x NaN.
    return torch.where(mask, x, torch.zeros_like(x)).sum()


def masked_mean(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """0 where no cell is True."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def masked_moments(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Moments:
    """Mean and unbiased variance; with fewer than two cells the variance is 1 (centre only)."""
    count = mask.sum()
    mean = masked_mean(x, mask)
    squares = masked_sum((x - mean) ** 2, mask)
    variance = torch.where(count > 1, squares / (count - 1).clamp(min=1), torch.ones_like(squares))
    return Moments(mean=mean, variance=variance, count=count)


def whiten(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], moments: Moments
) -> Float[Tensor, "*shape"]:
    """(x - mean) / sqrt(variance + 1e-8) on True cells, 0 elsewhere."""
    whitened = (x - moments.mean) * torch.rsqrt(moments.variance + EPSILON)
    return torch.where(mask, whitened, torch.zeros_like(x))


def explained_variance(
    values: Float[Tensor, "*shape"], returns: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """1 - Var(returns - values) / Var(returns): 1 = the critic foresaw all, 0 = as good as a
    constant, below 0 = worse than one. 0 where the returns do not vary."""
    unexplained = masked_moments(returns - values, mask).variance
    total = masked_moments(returns, mask).variance
    share = 1 - unexplained / torch.where(total > 0, total, torch.ones_like(total))
    return torch.where((total > 0) & (mask.sum() > 1), share, torch.zeros_like(share))


def cell_weights(
    mode: str, mask: Bool[Tensor, "rows response"], max_response_tokens: int, dtype: torch.dtype
) -> Float[Tensor, "rows response"]:
    """The weight of every cell of a minibatch; 0 on masked ones, all 0 where nothing counts."""
    tokens_of_row = mask.sum(dim=1, keepdim=True)
    rows = (tokens_of_row > 0).sum().clamp(min=1)
    match mode:
        case "token_mean":
            count = mask.sum().clamp(min=1)
        case "seq_mean_token_mean":
            count = rows * tokens_of_row.clamp(min=1)
        case "seq_mean_token_sum":
            count = rows
        case "seq_mean_token_sum_norm":
            count = rows * max_response_tokens
        case _:
            raise ValueError(f"no aggregation {mode!r}")
    return mask.to(dtype) / count


def weighted_sum(
    per_token: Float[Tensor, "rows response"], weights: Float[Tensor, "rows response"]
) -> Float[Tensor, ""]:
    """A microbatch's share of the minibatch's loss; what stands in cells of weight 0 is ignored."""
    return torch.where(weights > 0, per_token * weights, 0.0).sum()
