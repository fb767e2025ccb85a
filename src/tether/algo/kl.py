"""KL divergence: per-token estimates from sampled tokens, and exact sums over distributions.

Write q = log pi - log pi_ref. Tokens are drawn from the actor, so q averages to KL(pi || pi_ref):
the actor's divergence *from* the reference. k1, k2 and k3 are the names of Schulman's note
*Approximating KL Divergence* (2020), which compares them as values. Which of them has the right
gradient depends on where it is used (2506.09477, 2512.21852): docs/kl.md has the table, and
tests/learning/test_kl_bandit.py proves it.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is finite in every float type


def k1(
    log_probs: Float[Tensor, "*shape"],
    ref_log_probs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return q, 0 on masked cells.

    Unbiased; a single one may be negative, and clipping it would bias the mean.
    """
    return torch.where(mask, log_probs - ref_log_probs, 0.0)


def absolute(
    log_probs: Float[Tensor, "*shape"],
    ref_log_probs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return |q|: biased."""
    return k1(log_probs, ref_log_probs, mask).abs()


def k2(
    log_probs: Float[Tensor, "*shape"],
    ref_log_probs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return q²/2: biased as a value; the mean of its gradient is that of the exact KL."""
    return 0.5 * k1(log_probs, ref_log_probs, mask) ** 2


def k3(
    log_probs: Float[Tensor, "*shape"],
    ref_log_probs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return exp(-q) - 1 + q: unbiased, never negative.

    q is clamped to ±20 against overflow; clamping the result instead would bias it.
    """
    q = (log_probs - ref_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(mask, torch.expm1(-q) + q, 0.0)


def with_gradient_of_k2(
    value: Float[Tensor, "*shape"],
    log_probs: Float[Tensor, "*shape"],
    ref_log_probs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return the value of one estimator with the gradient of k2: verl's `+` forms."""
    carrier = k2(log_probs, ref_log_probs, mask)
    return carrier - carrier.detach() + value.detach()


def estimate_kl(
    name: str,
    log_probs: Float[Tensor, "*shape"],
    ref_log_probs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return the estimate by that name on True cells, 0 elsewhere.

    `full` is not one of them: it needs the whole vocabulary (`models.token_log_probs`).
    """
    arguments = log_probs, ref_log_probs, mask
    match name:
        case "k1":
            return k1(*arguments)
        case "abs":
            return absolute(*arguments)
        case "k2":
            return k2(*arguments)
        case "k3":
            return k3(*arguments)
        case "k1+":
            return with_gradient_of_k2(k1(*arguments), *arguments)
        case "k3+":
            return with_gradient_of_k2(k3(*arguments), *arguments)
    raise ValueError(f"unknown KL estimator {name!r}")


def sequence_k2(
    log_probs: Float[Tensor, "rows response"],
    old_log_probs: Float[Tensor, "rows response"],
    ref_log_probs: Float[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
) -> Float[Tensor, "rows response"]:
    """Return (sum of q)²/2 of each row, on its last True cell: one number per response.

    The mean of its gradient is that of the KL of whole responses, which a KL per token in the loss
    lacks: there a token is not charged for the KL in the states that it leads to. For responses of
    an older policy it is weighted by their ratio as a whole, without its gradient; on the policy's
    own that is 1.

    Tang and Munos 2025 (2506.09477), who show what the sum of per-token terms leaves out.
    """
    total = k1(log_probs, ref_log_probs, mask).sum(dim=1)
    moved = torch.where(mask, log_probs - old_log_probs, 0.0).sum(dim=1)
    weight = moved.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().detach()
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, -1).amax(dim=1)
    return torch.where(columns == last[:, None], (weight * 0.5 * total**2)[:, None], 0.0)


def full_kl(
    log_p: Float[Tensor, "*cells vocabulary"], log_q: Float[Tensor, "*cells vocabulary"]
) -> Float[Tensor, "*cells"]:
    """Return KL(p || q) summed over the vocabulary.

    A token with p = 0 adds 0, not 0 x infinity, to the value and to the gradient.
    """
    # Filled before the product, as a mask after it would pass the gradient of 0 x infinity.
    never = log_p == -math.inf
    difference = log_p.masked_fill(never, 0.0) - log_q.masked_fill(never, 0.0)
    return (log_p.exp() * difference).sum(dim=-1)


def exact_kl(p: Sequence[float], q: Sequence[float]) -> float:
    """Return KL(p || q) in nats; infinite where q is 0 and p is not."""
    if len(p) != len(q):
        raise ValueError(f"p has {len(p)} outcomes and q has {len(q)}")
    for name, distribution in (("p", p), ("q", q)):
        if min(distribution) < 0 or not math.isclose(math.fsum(distribution), 1, abs_tol=1e-6):
            raise ValueError(f"{name} is not a distribution: {list(distribution)}")
    if any(pi > 0 and qi == 0 for pi, qi in zip(p, q, strict=True)):
        return math.inf
    return math.fsum(pi * math.log(pi / qi) for pi, qi in zip(p, q, strict=True) if pi > 0)


def adaptive_beta(beta: float, kl: float, target: float, rows: int, horizon: int) -> float:
    """Return the next beta: higher where the KL is above its target, lower below it.

    It changes by at most 20% per `horizon` rows. Ziegler et al. 2019 (1909.08593), section 2.2.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * rows / horizon)


def adaptive_penalty(coef: float, kl: float, target: float) -> float:
    """Return PPO-Penalty's next weight: halved below target / 1.5, doubled above target x 1.5.

    Schulman et al. 2017 (1707.06347), section 4.
    """
    if kl < target / 1.5:
        return coef / 2
    return coef * 2 if kl > target * 1.5 else coef
