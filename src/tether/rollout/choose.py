"""Choosing a token from log-probs, without any generator state."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tether.algo.random import uniform
from tether.rollout.episode import Draw, Greedy


def choose_tokens(
    log_probs: Float[Tensor, "rows vocabulary"],
    choice: Draw | Greedy,
    rows: np.ndarray,
    columns: np.ndarray,
) -> Int[Tensor, " rows"]:
    """One token a row; `rows` and `columns` are its place in the whole rollout batch."""
    match choice:
        case Greedy():
            return log_probs.argmax(dim=-1)
        case Draw(seed, purpose, iteration):
            u = uniform(seed, purpose, iteration, rows, columns).to(log_probs.device)
            return inverse_cdf(log_probs, u)


def inverse_cdf(
    log_probs: Float[Tensor, "rows vocabulary"], u: Float[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """The first token whose cumulative probability exceeds u; float64, as a float32 sum over a
    large vocabulary loses the tail."""
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    # Scaled by the total, u stays below the last cumulative value whatever the rounding; since a
    # token of probability 0 does not raise the sum, it is never the first to exceed u.
    target = u[:, None] * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # A NaN has no place; any id will do, as its log-prob tells that the row cannot be used.
    return place.clamp(max=log_probs.shape[1] - 1)
