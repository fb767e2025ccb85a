"""Losses a token, not yet averaged: `aggregation` weighs the cells of a minibatch.

A policy loss pushes up what had a positive advantage A and down what had a negative one; the
kinds differ in what keeps the new policy near the old. r = pi_new / pi_old on the sampled token.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from tether.algo.kl import MAX_LOG_RATIO


class PolicyLoss(NamedTuple):
    """A loss a token, the ratio behind it, and where a bound took the gradient away."""

    per_token: Float[Tensor, "rows response"]
    ratio: Float[Tensor, "rows response"]
    clipped_high: Bool[Tensor, "rows response"]
    clipped_low: Bool[Tensor, "rows response"]


def log_ratio(
    new_log_probs: Float[Tensor, "rows response"], old_log_probs: Float[Tensor, "rows response"]
) -> Float[Tensor, "rows response"]:
    """log pi_new - log pi_old, held within ±20 against overflow."""
    return (new_log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_policy_loss(
    new_log_probs: Float[Tensor, "rows response"],
    old_log_probs: Float[Tensor, "rows response"],
    advantages: Float[Tensor, "rows response"],
    eps_low: float,
    eps_high: float,
) -> PolicyLoss:
    """PPO-Clip: max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)).

    The larger loss is the smaller objective: the clip may take a gain away, never a loss.
    """
    return _clipped(log_ratio(new_log_probs, old_log_probs).exp(), advantages, eps_low, eps_high)


def dual_clip(
    loss: PolicyLoss, advantages: Float[Tensor, "rows response"], bound: float
) -> PolicyLoss:
    """For A < 0 the clipped loss grows with r without end; hold it at -bound x A."""
    ceiling = -bound * advantages
    held = torch.where(advantages < 0, torch.minimum(loss.per_token, ceiling), loss.per_token)
    beyond = (advantages < 0) & (loss.per_token > ceiling)
    return loss._replace(per_token=held, clipped_high=loss.clipped_high | beyond)


def cpi_policy_loss(
    new_log_probs: Float[Tensor, "rows response"],
    old_log_probs: Float[Tensor, "rows response"],
    advantages: Float[Tensor, "rows response"],
) -> PolicyLoss:
    """-A r: the surrogate of conservative policy iteration, with nothing to hold it."""
    ratio = log_ratio(new_log_probs, old_log_probs).exp()
    return _unclipped(-advantages * ratio, ratio)


def penalty_policy_loss(
    new_log_probs: Float[Tensor, "rows response"],
    old_log_probs: Float[Tensor, "rows response"],
    advantages: Float[Tensor, "rows response"],
    kl_from_old: Float[Tensor, "rows response"],
    coef: float,
) -> PolicyLoss:
    """PPO-Penalty: -A r + coef x KL(pi_old || pi_new)."""
    surrogate = cpi_policy_loss(new_log_probs, old_log_probs, advantages)
    return surrogate._replace(per_token=surrogate.per_token + coef * kl_from_old)


def reinforce_policy_loss(
    new_log_probs: Float[Tensor, "rows response"],
    old_log_probs: Float[Tensor, "rows response"],
    advantages: Float[Tensor, "rows response"],
) -> PolicyLoss:
    """-A log pi_new: the plain policy gradient; right on fresh samples only."""
    ratio = log_ratio(new_log_probs, old_log_probs).exp()
    return _unclipped(-advantages * new_log_probs, ratio)


def gspo_policy_loss(
    new_log_probs: Float[Tensor, "rows response"],
    old_log_probs: Float[Tensor, "rows response"],
    advantages: Float[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
    eps_low: float,
    eps_high: float,
) -> PolicyLoss:
    """GSPO: one ratio a response, exp(mean of log r), clipped as a whole.

    Each token carries its row's ratio as a number and its own log-prob as the gradient.
    """
    tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = torch.where(mask, new_log_probs - old_log_probs, 0.0).sum(dim=1, keepdim=True) / tokens
    carried = mean.detach() + new_log_probs - new_log_probs.detach()
    ratio = carried.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return _clipped(ratio, advantages, eps_low, eps_high)


def cispo_policy_loss(
    new_log_probs: Float[Tensor, "rows response"],
    old_log_probs: Float[Tensor, "rows response"],
    advantages: Float[Tensor, "rows response"],
    eps_low: float,
    eps_high: float,
) -> PolicyLoss:
    """CISPO: -sg(clip(r)) A log pi_new. The clip bounds a token's weight, never its gradient."""
    ratio = log_ratio(new_log_probs, old_log_probs).exp().detach()
    weight = ratio.clamp(1 - eps_low, 1 + eps_high)
    return PolicyLoss(
        per_token=-weight * advantages * new_log_probs,
        ratio=ratio,
        clipped_high=ratio > 1 + eps_high,
        clipped_low=ratio < 1 - eps_low,
    )


def _clipped(
    ratio: Float[Tensor, "rows response"],
    advantages: Float[Tensor, "rows response"],
    eps_low: float,
    eps_high: float,
) -> PolicyLoss:
    held = ratio.clamp(1 - eps_low, 1 + eps_high)
    return PolicyLoss(
        per_token=torch.maximum(-advantages * ratio, -advantages * held),
        ratio=ratio.detach(),
        clipped_high=(advantages > 0) & (ratio > 1 + eps_high),
        clipped_low=(advantages < 0) & (ratio < 1 - eps_low),
    )


def _unclipped(
    per_token: Float[Tensor, "rows response"], ratio: Float[Tensor, "rows response"]
) -> PolicyLoss:
    never = torch.zeros_like(per_token, dtype=torch.bool)
    return PolicyLoss(per_token, ratio.detach(), never, never)


class ValueLoss(NamedTuple):
    per_token: Float[Tensor, "rows response"]
    clipped: Bool[Tensor, "rows response"]


def squared_value_loss(
    new_values: Float[Tensor, "rows response"], returns: Float[Tensor, "rows response"]
) -> ValueLoss:
    """Half the squared error."""
    error = (new_values - returns) ** 2
    return ValueLoss(0.5 * error, torch.zeros_like(error, dtype=torch.bool))


def clip_value_loss(
    new_values: Float[Tensor, "rows response"],
    old_values: Float[Tensor, "rows response"],
    returns: Float[Tensor, "rows response"],
    clip: float,
) -> ValueLoss:
    """Half the larger squared error: of the value, or of the value held near its old one."""
    # Within the clip the value itself is held: old + (new - old) may be a rounding away from it.
    moved = new_values - old_values
    beyond = moved.abs() > clip
    held = torch.where(beyond, old_values + moved.clamp(-clip, clip), new_values)
    error, held_error = (new_values - returns) ** 2, (held - returns) ** 2
    return ValueLoss(0.5 * torch.maximum(error, held_error), held_error > error)


def bradley_terry_losses(
    chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"]
) -> Float[Tensor, " pairs"]:
    """-log P(chosen beats rejected) of each pair; log 2 where the scores are equal."""
    return functional.softplus(rejected - chosen)
