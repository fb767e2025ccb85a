"""From losses a token to one number.

A numerator is summed microbatch by microbatch and divided by a count taken over the whole
minibatch before the first backward, so the gradient does not depend on how rows were split.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.algo.masked import masked_sum


def token_count(mask: Bool[Tensor, "rows response"]) -> Int[Tensor, ""]:
    """The denominator of `token_mean`; 1 where nothing counts, so that the loss is 0, not NaN."""
    return mask.sum().clamp(min=1)


def token_mean(
    per_token: Float[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
    count: Int[Tensor, ""],
) -> Float[Tensor, ""]:
    """This microbatch's share of the mean over the minibatch's `count` tokens."""
    return masked_sum(per_token, mask) / count
