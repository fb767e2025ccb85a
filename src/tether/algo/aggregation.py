"""From losses a token to one number: each cell of a minibatch gets a weight, and the sum is taken.

    token_mean               1 / tokens                        every token counts the same
    seq_mean_token_mean      1 / (rows x tokens of the row)    every row counts the same
    seq_mean_token_sum       1 / rows                          long rows count more
    seq_mean_token_sum_norm  1 / (rows x max_response_tokens)  the same, on a fixed scale

`tokens` and `rows` (those with a True cell) are counted over the whole minibatch before its first
backward, so the gradient does not depend on how its rows are split into microbatches.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


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
