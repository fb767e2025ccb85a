"""Sums, means and moments over the True cells of a mask.

Where `rows` says that other processes have rows too, they are over the cells of all.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.types import ALL_HERE, Moments, Rows

EPSILON = 1e-8


def masked_sum(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Sum the True cells."""
    # where() and not a product: a NaN in a masked cell must not survive 0 x NaN.
    return torch.where(mask, x, torch.zeros_like(x)).sum()


def masked_mean(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], rows: Rows = ALL_HERE
) -> Float[Tensor, ""]:
    """Return the mean over the True cells, 0 where there is none."""
    return rows.sum(masked_sum(x, mask)) / rows.sum(mask.sum()).clamp(min=1)


def masked_moments(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], rows: Rows = ALL_HERE
) -> Moments:
    """Return mean and unbiased variance over the True cells.

    With fewer than two cells the variance is 1, so that whitening only centres.
    """
    count = rows.sum(mask.sum())
    mean = masked_mean(x, mask, rows)
    squares = rows.sum(masked_sum((x - mean) ** 2, mask))
    variance = torch.where(count > 1, squares / (count - 1).clamp(min=1), torch.ones_like(squares))
    return Moments(mean=mean, variance=variance, count=count)


def whiten(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], moments: Moments
) -> Float[Tensor, "*shape"]:
    """Return (x - mean) / sqrt(variance + 1e-8) on True cells, 0 elsewhere."""
    whitened = (x - moments.mean) * torch.rsqrt(moments.variance + EPSILON)
    return torch.where(mask, whitened, torch.zeros_like(x))


def explained_variance(
    values: Float[Tensor, "*shape"],
    returns: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    rows: Rows = ALL_HERE,
) -> Float[Tensor, ""]:
    """Return 1 - Var(returns - values) / Var(returns) over the True cells.

    1 = the critic predicts every return, 0 = no better than a constant, below 0 = worse than one.
    It is 0 where the returns do not vary.
    """
    unexplained = masked_moments(returns - values, mask, rows).variance
    moments = masked_moments(returns, mask, rows)
    total, count = moments.variance, moments.count
    share = 1 - unexplained / torch.where(total > 0, total, torch.ones_like(total))
    return torch.where((total > 0) & (count > 1), share, torch.zeros_like(share))


def cell_weights(
    mode: str,
    mask: Bool[Tensor, "rows response"],
    max_response_tokens: int,
    dtype: torch.dtype,
    rows: Rows = ALL_HERE,
) -> Float[Tensor, "rows response"]:
    """Return the weight of each cell in a minibatch's loss, by the aggregation of that name.

    0 on masked cells. Weights are counted over the whole minibatch, so that a split into
    microbatches changes no gradient. `seq_mean_token_sum_norm` divides by a constant, as Dr. GRPO
    does (Liu et al. 2025, 2503.20783); `token_mean` is that of DAPO (Yu et al. 2025, 2503.14476).
    """
    tokens_of_row = mask.sum(dim=1, keepdim=True)
    counted = rows.sum((tokens_of_row > 0).sum()).clamp(min=1)
    match mode:
        case "token_mean":
            count = rows.sum(mask.sum()).clamp(min=1)
        case "seq_mean_token_mean":
            count = counted * tokens_of_row.clamp(min=1)
        case "seq_mean_token_sum":
            count = counted
        case "seq_mean_token_sum_norm":
            count = counted * max_response_tokens
        case _:
            raise ValueError(f"unknown aggregation {mode!r}")
    return mask.to(dtype) / count


def weighted_sum(
    per_token: Float[Tensor, "rows response"], weights: Float[Tensor, "rows response"]
) -> Float[Tensor, ""]:
    """Return a microbatch's share of the minibatch's loss; cells of weight 0 are ignored."""
    return torch.where(weights > 0, per_token * weights, 0.0).sum()
