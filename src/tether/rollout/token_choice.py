"""Choosing a token from logits, without the state of a random generator.

Without transformers either: `tether kl` draws its samples here.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tether.algo.random import uniform

BLOCK = 256  # tokens summed together before the cumulative sum


@dataclass(frozen=True)
class Draw:
    """Sample tokens with random numbers that are computed from this key."""

    seed: int
    purpose: str
    iteration: int


@dataclass(frozen=True)
class Greedy:
    """Always choose the likeliest token."""


def choose_tokens(
    logits: Float[Tensor, "rows vocabulary"],
    choice: Draw | Greedy,
    rows: np.ndarray,
    columns: np.ndarray,
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Return a token per row and its log-prob.

    `rows` and `columns` are the token's place in the rollout batch: its random number is computed
    from them.
    """
    probs = torch.softmax(logits, dim=-1)
    match choice:
        case Greedy():
            tokens = logits.argmax(dim=-1)
        case Draw(seed, purpose, iteration):
            u = uniform(seed, purpose, iteration, rows, columns).to(logits.device)
            tokens = inverse_cdf(probs, u)
    # The likeliest token's probability is exp(top) / sum(exp): its log gives the normaliser without
    # another pass, and unlike log(prob) this never underflows.
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return tokens, chosen - logits.amax(dim=-1) + probs.amax(dim=-1).log()


def inverse_cdf(
    weights: Float[Tensor, "rows vocabulary"], u: Float[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """Return the first token whose cumulative share of the row's weights exceeds u.

    The cumulative sum is float64, as float32 would lose the tail of a large vocabulary. It goes
    over blocks first, then over the block that u falls into.
    """
    rows, vocabulary = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocabulary % BLOCK)).view(rows, -1, BLOCK)
    until = padded.sum(dim=-1).double().cumsum(dim=-1)  # the end of each block
    target = u[:, None] * until[:, -1:]
    block = _first_above(until, target)
    begins = torch.where(block > 0, until.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = padded[torch.arange(rows, device=block.device), block[:, 0]].double().cumsum(dim=-1)
    # Blocks are summed in another order than cells: the last cell with weight gets the remainder.
    below_end = torch.nextafter(inside[:, -1:], torch.zeros_like(target))
    cell = _first_above(inside, torch.minimum(target - begins, below_end))
    # With NaN weights any id will do: its log-prob is NaN, so the row is left out later.
    return (block * BLOCK + cell).squeeze(1).clamp(max=vocabulary - 1)


def _first_above(
    ascending: Float[Tensor, "rows cells"], target: Float[Tensor, "rows 1"]
) -> Int[Tensor, "rows 1"]:
    """Return the first cell above the target; a cell of weight 0 is never the first."""
    place = torch.searchsorted(ascending, target, right=True)
    return place.clamp(max=ascending.shape[1] - 1)
