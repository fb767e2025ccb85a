"""Losses of the actor, the critic and the reward model, per token or per pair, not yet averaged.

`policy_loss(update, inputs)` is the one way to a policy loss: trainer, trace and page call it with
the config's own `actor.update` section, and `POLICY_LOSSES` has the function for each kind. To add
a loss: a section in `config/algorithm.py`, and here a function and a line of that table.

A policy loss pushes up tokens of positive advantage A and down those of negative; the kinds differ
in what holds the new policy near the old. r = pi_new / pi_old of the sampled token.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from tether.algo.kl import MAX_LOG_RATIO, k3
from tether.config.algorithm import (
    AnyUpdate,
    CispoUpdate,
    ClipUpdate,
    CpiUpdate,
    DppoUpdate,
    GspoUpdate,
    PenaltyUpdate,
    ReinforceUpdate,
    TrpoUpdate,
)


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss reads. Only `new_log_probs` and `kl_from_old` may carry a gradient."""

    new_log_probs: Float[Tensor, "rows response"]
    old_log_probs: Float[Tensor, "rows response"]
    advantages: Float[Tensor, "rows response"]
    mask: Bool[Tensor, "rows response"]
    # Exact KL(pi_old || pi_new) where `update.needs_old_policy`; None = estimate it from samples.
    kl_from_old: Float[Tensor, "rows response"] | None = None

    @property
    def ratio(self) -> Float[Tensor, "rows response"]:
        """Return r = pi_new / pi_old of each sampled token, with its gradient."""
        return log_ratio(self.new_log_probs, self.old_log_probs).exp()


@dataclass(frozen=True)
class PolicyLoss:
    """A loss per token and what its bound did there. All but `per_token` are without gradient.

    A cell is clipped where the bound changed its gradient: to 0, or in CISPO to that of a smaller
    weight. The three kinds of clipped cells do not overlap.
    """

    per_token: Float[Tensor, "rows response"]
    ratio: Float[Tensor, "rows response"]  # as the loss used it: in GSPO the response's
    clipped_high: Bool[Tensor, "rows response"]  # the ratio rose too far
    clipped_low: Bool[Tensor, "rows response"]  # it fell too far
    clipped_dual: Bool[Tensor, "rows response"]  # it rose, A < 0, and the dual clip held the loss
    # Beyond the bound, clipped or not; None for a kind without a bound per token.
    outside: Bool[Tensor, "rows response"] | None = None
    # The loss with the clipped ratio, where `per_token` is the larger of two losses.
    with_clipped_ratio: Float[Tensor, "rows response"] | None = None

    @property
    def clipped(self) -> Bool[Tensor, "rows response"]:
        """Return the cells whose gradient the bound changed."""
        return self.clipped_high | self.clipped_low | self.clipped_dual


def policy_loss(update: AnyUpdate, inputs: LossInputs) -> PolicyLoss:
    """Return the policy loss that `actor.update` names, rows x response, before averaging."""
    return POLICY_LOSSES[update.kind](update, inputs)


def log_ratio(
    new_log_probs: Float[Tensor, "rows response"], old_log_probs: Float[Tensor, "rows response"]
) -> Float[Tensor, "rows response"]:
    """Return log pi_new - log pi_old, held within ±20 against overflow."""
    return (new_log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_policy_loss(update: ClipUpdate, inputs: LossInputs) -> PolicyLoss:
    """Return max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)), and with dual clip no more than
    -dual_clip x A where A < 0.

    The larger loss is the smaller objective: the clip can take away a gain, never a loss. For A < 0
    that loss grows with r without limit, which is what the dual clip is for.

    PPO, Schulman et al. 2017, arXiv 1707.06347; eps_high > eps_low is clip-higher, DAPO, Yu et al.
    2025, arXiv 2503.14476; dual clip, Ye et al. 2020, arXiv 1912.09729.
    """
    loss = _clipped(inputs.ratio, inputs.advantages, update.eps_low, update.eps_high)
    if update.dual_clip is None:
        return loss
    negative, ceiling = inputs.advantages < 0, -update.dual_clip * inputs.advantages
    return replace(
        loss,
        per_token=torch.where(negative, torch.minimum(loss.per_token, ceiling), loss.per_token),
        clipped_dual=negative & (loss.per_token > ceiling),
    )


def cpi_policy_loss(update: CpiUpdate | TrpoUpdate, inputs: LossInputs) -> PolicyLoss:
    """Return -A r: the surrogate of conservative policy iteration, without a bound.

    Kakade and Langford 2002. TRPO minimises it under a constraint on the whole step.
    """
    ratio = inputs.ratio
    return _unbounded(-inputs.advantages * ratio, ratio)


def penalty_policy_loss(update: PenaltyUpdate, inputs: LossInputs) -> PolicyLoss:
    """Return -A r + coef x KL(pi_old || pi_new), the KL exact if given, otherwise k3.

    PPO-Penalty, Schulman et al. 2017, arXiv 1707.06347, section 4.
    """
    new, old = inputs.new_log_probs, inputs.old_log_probs
    kl = k3(old, new, inputs.mask) if inputs.kl_from_old is None else inputs.kl_from_old
    ratio = inputs.ratio
    return _unbounded(-inputs.advantages * ratio + update.coef * kl, ratio)


def reinforce_policy_loss(update: ReinforceUpdate, inputs: LossInputs) -> PolicyLoss:
    """Return -A log pi_new: the plain policy gradient, right on fresh samples only.

    REINFORCE, Williams 1992, Machine Learning 8.
    """
    return _unbounded(-inputs.advantages * inputs.new_log_probs, inputs.ratio)


def gspo_policy_loss(update: GspoUpdate, inputs: LossInputs) -> PolicyLoss:
    """Return PPO's clipped loss with one ratio per response, exp(mean of log r over its tokens).

    Each token has its row's ratio as a number and its own log-prob as the gradient.

    GSPO, Zheng et al. 2025, arXiv 2507.18071 (its token-level form, GSPO-token).
    """
    new, mask = inputs.new_log_probs, inputs.mask
    tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = torch.where(mask, new - inputs.old_log_probs, 0.0).sum(dim=1, keepdim=True) / tokens
    carried = mean.detach() + new - new.detach()
    ratio = carried.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return _clipped(ratio, inputs.advantages, update.eps_low, update.eps_high)


def cispo_policy_loss(update: CispoUpdate, inputs: LossInputs) -> PolicyLoss:
    """Return -sg(clip(r)) A log pi_new: the clip limits a token's weight and never its gradient.

    CISPO, MiniMax-M1 2025, arXiv 2506.13585.
    """
    ratio = inputs.ratio.detach()
    weight = ratio.clamp(1 - update.eps_low, 1 + update.eps_high)
    high, low = ratio > 1 + update.eps_high, ratio < 1 - update.eps_low
    return PolicyLoss(
        per_token=-weight * inputs.advantages * inputs.new_log_probs,
        ratio=ratio,
        clipped_high=high,
        clipped_low=low,
        clipped_dual=torch.zeros_like(high),
        outside=high | low,
    )


def dppo_policy_loss(update: DppoUpdate, inputs: LossInputs) -> PolicyLoss:
    """Return -A r, or 0 for a token beyond `max_divergence` whose A would push it further.

    The divergence of old and new policy is that of two outcomes, the sampled token or any other: a
    lower bound of the true one. Unlike the ratio it is small where a rare token doubles, and large
    where a common one is halved.

    DPPO, Qi et al. 2026, arXiv 2602.04879, equations 11 to 14, where the old policy is the
    sampler's: `rollout.reuse_log_probs`.
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    new, old = inputs.new_log_probs.detach(), inputs.old_log_probs
    distance = binary_tv if update.divergence == "tv" else binary_kl
    outside = distance(old, new) > update.max_divergence
    high = outside & (advantages > 0) & (new > old)
    low = outside & (advantages < 0) & (new < old)
    return PolicyLoss(
        per_token=torch.where(high | low, 0.0, -advantages * ratio),
        ratio=ratio.detach(),
        clipped_high=high,
        clipped_low=low,
        clipped_dual=torch.zeros_like(high),
        outside=outside,
    )


def binary_tv(
    log_p: Float[Tensor, "rows response"], log_q: Float[Tensor, "rows response"]
) -> Float[Tensor, "rows response"]:
    """Return the total variation |p - q| of two coins, by the log-probs of one side."""
    return (log_p.exp() - log_q.exp()).abs()


def binary_kl(
    log_p: Float[Tensor, "rows response"], log_q: Float[Tensor, "rows response"]
) -> Float[Tensor, "rows response"]:
    """Return KL(p || q) of two coins, by the log-probs of one side; finite for q = 1 too."""
    tiny = torch.finfo(log_p.dtype).tiny
    other_p, other_q = -torch.expm1(log_p), -torch.expm1(log_q)
    others = other_p * (other_p.clamp(min=tiny).log() - other_q.clamp(min=tiny).log())
    return log_p.exp() * (log_p - log_q) + others


POLICY_LOSSES: dict[str, Callable[[Any, LossInputs], PolicyLoss]] = {
    "clip": clip_policy_loss,
    "penalty": penalty_policy_loss,
    "trpo": cpi_policy_loss,
    "cpi": cpi_policy_loss,
    "reinforce": reinforce_policy_loss,
    "gspo": gspo_policy_loss,
    "cispo": cispo_policy_loss,
    "dppo": dppo_policy_loss,
}


def _clipped(
    ratio: Float[Tensor, "rows response"],
    advantages: Float[Tensor, "rows response"],
    eps_low: float,
    eps_high: float,
) -> PolicyLoss:
    with_clipped_ratio = -advantages * ratio.clamp(1 - eps_low, 1 + eps_high)
    high, low = ratio > 1 + eps_high, ratio < 1 - eps_low
    return PolicyLoss(
        per_token=torch.maximum(-advantages * ratio, with_clipped_ratio),
        ratio=ratio.detach(),
        clipped_high=(advantages > 0) & high,
        clipped_low=(advantages < 0) & low,
        clipped_dual=torch.zeros_like(high),
        outside=high | low,
        with_clipped_ratio=with_clipped_ratio.detach(),
    )


def _unbounded(
    per_token: Float[Tensor, "rows response"], ratio: Float[Tensor, "rows response"]
) -> PolicyLoss:
    never = torch.zeros_like(per_token, dtype=torch.bool)
    return PolicyLoss(per_token, ratio.detach(), never, never, never)


@dataclass(frozen=True)
class ValueLoss:
    """A critic's loss per token, and where the clipped value gave the larger error."""

    per_token: Float[Tensor, "rows response"]
    clipped: Bool[Tensor, "rows response"]


def squared_value_loss(
    new_values: Float[Tensor, "rows response"], returns: Float[Tensor, "rows response"]
) -> ValueLoss:
    """Return half the squared error."""
    error = (new_values - returns) ** 2
    return ValueLoss(0.5 * error, torch.zeros_like(error, dtype=torch.bool))


def clip_value_loss(
    new_values: Float[Tensor, "rows response"],
    old_values: Float[Tensor, "rows response"],
    returns: Float[Tensor, "rows response"],
    clip: float,
) -> ValueLoss:
    """Return half the larger squared error: of the value, or of the value within `clip` of its old.

    Not in the PPO paper but in its authors' code (openai/baselines, ppo2); Engstrom et al. 2020,
    arXiv 2005.12729, measured what it does.
    """
    # Inside the clip the value itself is used: old + (new - old) can differ from it by rounding.
    moved = new_values - old_values
    beyond = moved.abs() > clip
    held = torch.where(beyond, old_values + moved.clamp(-clip, clip), new_values)
    error, held_error = (new_values - returns) ** 2, (held - returns) ** 2
    return ValueLoss(0.5 * torch.maximum(error, held_error), held_error > error)


def bradley_terry_losses(
    chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"]
) -> Float[Tensor, " pairs"]:
    """Return -log P(chosen beats rejected) of each pair; log 2 where the scores are equal.

    Bradley and Terry 1952; as a reward model's loss: Ouyang et al. 2022, arXiv 2203.02155.
    """
    return functional.softplus(rejected - chosen)
