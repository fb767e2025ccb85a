"""Losses a token, not yet averaged: `aggregation` divides by a count over the minibatch."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.kl import MAX_LOG_RATIO


class PolicyLoss(NamedTuple):
    """A loss a token, the ratio it used, and where the clip took the gradient away."""

    per_token: Float[Tensor, "rows response"]
    ratio: Float[Tensor, "rows response"]
    clipped: Bool[Tensor, "rows response"]


def clip_policy_loss(
    new_log_probs: Float[Tensor, "rows response"],
    old_log_probs: Float[Tensor, "rows response"],
    advantages: Float[Tensor, "rows response"],
    eps_low: float,
    eps_high: float,
) -> PolicyLoss:
    """PPO-Clip: max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)), r = pi_new / pi_old.

    The larger loss is the smaller objective: the clip may take a gain away, never a loss.
    """
    ratio = (new_log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    held = ratio.clamp(1 - eps_low, 1 + eps_high)
    per_token = torch.maximum(-advantages * ratio, -advantages * held)
    too_high = (advantages > 0) & (ratio > 1 + eps_high)
    too_low = (advantages < 0) & (ratio < 1 - eps_low)
    return PolicyLoss(per_token, ratio.detach(), too_high | too_low)


class ValueLoss(NamedTuple):
    per_token: Float[Tensor, "rows response"]
    clipped: Bool[Tensor, "rows response"]


def clip_value_loss(
    new_values: Float[Tensor, "rows response"],
    old_values: Float[Tensor, "rows response"],
    returns: Float[Tensor, "rows response"],
    clip: float,
) -> ValueLoss:
    """Half the larger squared error: of the value, or of the value held near its old one."""
    held = old_values + (new_values - old_values).clamp(-clip, clip)
    error, held_error = (new_values - returns) ** 2, (held - returns) ** 2
    return ValueLoss(0.5 * torch.maximum(error, held_error), held_error > error)
