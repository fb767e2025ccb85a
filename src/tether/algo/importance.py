"""Importance weights for rollouts of another engine, whose log-probs differ from the trainer's.

d = log pi_old - log pi_rollout of a sampled token. The sampler drew from pi_rollout, so a token
weighs e^d in a mean over pi_old. Weights are truncated at a cap, as a few large ones would drown
the rest: Ionides 2008, Truncated Importance Sampling, JCGS 17; for rollout engines Yao et al. 2025,
Your Efficient RL Framework Secretly Brings You Off-Policy RL Training.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.masked import masked_mean
from tether.types import ALL_HERE, Rows


def mismatch(
    old_log_probs: Float[Tensor, "rows response"],
    rollout_log_probs: Float[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
) -> Float[Tensor, "rows response"]:
    """Return d on True cells, 0 elsewhere."""
    return torch.where(mask, old_log_probs - rollout_log_probs, 0.0)


def correction_weights(
    kind: str,
    d: Float[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
    cap: float,
) -> Float[Tensor, "rows response"]:
    """Return the weight of each token in the policy loss, without gradient; 0 on masked cells."""
    match kind:
        case "none":
            weights = torch.ones_like(d)
        case "token":
            weights = token_weights(d, cap)
        case "sequence":
            weights = sequence_weights(d, cap)[:, None].expand_as(d)
        case _:
            raise ValueError(f"unknown correction {kind!r}")
    return torch.where(mask, weights, 0.0).detach()


def token_weights(d: Float[Tensor, "rows response"], cap: float) -> Float[Tensor, "rows response"]:
    """Return min(e^d, cap): one weight per token."""
    return d.exp().clamp(max=cap)


def sequence_weights(d: Float[Tensor, "rows response"], cap: float) -> Float[Tensor, " rows"]:
    """Return min(e^(sum of d), cap): one weight per row."""
    return d.sum(dim=1).exp().clamp(max=cap)


def mean_gap(
    d: Float[Tensor, "rows response"], mask: Bool[Tensor, "rows response"], rows: Rows = ALL_HERE
) -> Float[Tensor, ""]:
    """Return the mean of |d| per token."""
    return masked_mean(d.abs(), mask, rows)


def mismatch_kl(
    d: Float[Tensor, "rows response"], mask: Bool[Tensor, "rows response"], rows: Rows = ALL_HERE
) -> Float[Tensor, ""]:
    """Return the mean of e^d - d - 1 per token: k3 of KL(pi_rollout || pi_old)."""
    return masked_mean(d.expm1() - d, mask, rows)


def effective_share(
    d: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], rows: Rows = ALL_HERE
) -> Float[Tensor, ""]:
    """Return (sum w)^2 / (n sum w^2) of w = e^d, uncapped: the effective share of the n samples.

    1 where all weights are equal, and where there are none.
    """
    # A common factor cancels, so the largest weight may be 1 and nothing overflows.
    counted = torch.where(mask, d, -torch.inf)
    largest = rows.everyone(counted.amax(dim=1) if d.ndim > 1 else counted).amax()
    weights = torch.where(mask, (d - largest).double().exp(), 0.0)
    count, squares = rows.sum(mask.sum()), rows.sum((weights**2).sum())
    share = rows.sum(weights.sum()) ** 2 / (count * squares)
    return torch.where(count > 0, share, 1.0)
