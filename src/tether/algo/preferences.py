"""Pairwise preferences after Bradley and Terry: P(chosen beats rejected) = sigmoid(difference)."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def bradley_terry_losses(
    chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"]
) -> Float[Tensor, " pairs"]:
    """-log P(chosen beats rejected) of each pair; log 2 where the scores are equal."""
    return functional.softplus(rejected - chosen)
