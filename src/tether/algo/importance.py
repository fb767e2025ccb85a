"""When another engine samples: how far its log-probs are from the trainer's, and what to do.

d = log pi_old - log pi_rollout of a sampled token. The sampler drew from pi_rollout, so a token
weighs e^d in a mean over pi_old. Weights are capped: a few large ones would drown the rest.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.masked import masked_mean


def mismatch(
    old_log_probs: Float[Tensor, "rows response"],
    rollout_log_probs: Float[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
) -> Float[Tensor, "rows response"]:
    """d on True cells, 0 elsewhere."""
    return torch.where(mask, old_log_probs - rollout_log_probs, 0.0)


def correction_weights(
    kind: str,
    d: Float[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
    cap: float,
) -> Float[Tensor, "rows response"]:
    """What a token's policy loss is multiplied by, without gradient; 0 on masked cells."""
    match kind:
        case "none":
            weights = torch.ones_like(d)
        case "token":
            weights = token_weights(d, cap)
        case "sequence":
            weights = sequence_weights(d, cap)[:, None].expand_as(d)
        case _:
            raise ValueError(f"no correction {kind!r}")
    return torch.where(mask, weights, 0.0).detach()


def token_weights(d: Float[Tensor, "rows response"], cap: float) -> Float[Tensor, "rows response"]:
    """min(e^d, cap): each token for itself."""
    return d.exp().clamp(max=cap)


def sequence_weights(d: Float[Tensor, "rows response"], cap: float) -> Float[Tensor, " rows"]:
    """min(e^(sum of d), cap): one weight for all tokens of a row."""
    return d.sum(dim=1).exp().clamp(max=cap)


def mean_gap(
    d: Float[Tensor, "rows response"], mask: Bool[Tensor, "rows response"]
) -> Float[Tensor, ""]:
    """Mean of |d| a token."""
    return masked_mean(d.abs(), mask)


def mismatch_kl(
    d: Float[Tensor, "rows response"], mask: Bool[Tensor, "rows response"]
) -> Float[Tensor, ""]:
    """Mean of e^d - d - 1 a token: KL(pi_rollout || pi_old) from the sampler's own draws."""
    return masked_mean(d.expm1() - d, mask)


def effective_share(d: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """(sum w)^2 / (n sum w^2) of w = e^d, uncapped: the share of the n samples that are worth as
    much as samples of pi_old itself. 1 where all weights are equal, and where there are none."""
    # A common factor cancels, so the largest weight may be 1 and nothing overflows.
    largest = torch.where(mask, d, -torch.inf).amax()
    weights = torch.where(mask, (d - largest).double().exp(), 0.0)
    share = weights.sum() ** 2 / (mask.sum() * (weights**2).sum())
    return torch.where(mask.any(), share, 1.0)
