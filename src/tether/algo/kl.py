"""KL divergence: per-token estimates from sampled tokens, and the exact sum over distributions.

Tokens are drawn from the actor, so log pi - log pi_ref averages to KL(pi || pi_ref): the actor's
divergence *from* the reference. A single k1 may be negative; clipping it would bias the mean.
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
    """log pi - log pi_ref: unbiased, may be negative."""
    return torch.where(mask, log_probs - ref_log_probs, torch.zeros_like(log_probs))


def k3(
    log_probs: Float[Tensor, "*shape"],
    ref_log_probs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """exp(-q) - 1 + q with q = log pi - log pi_ref: unbiased on samples of pi, never negative."""
    q = (log_probs - ref_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(mask, torch.expm1(-q) + q, torch.zeros_like(q))


def exact_kl(p: Sequence[float], q: Sequence[float]) -> float:
    """KL(p || q) in nats; infinite where q is 0 and p is not."""
    if len(p) != len(q):
        raise ValueError(f"p has {len(p)} outcomes and q has {len(q)}")
    for name, distribution in (("p", p), ("q", q)):
        if min(distribution) < 0 or not math.isclose(math.fsum(distribution), 1, abs_tol=1e-6):
            raise ValueError(f"{name} is no distribution: {list(distribution)}")
    if any(pi > 0 and qi == 0 for pi, qi in zip(p, q, strict=True)):
        return math.inf
    return math.fsum(pi * math.log(pi / qi) for pi, qi in zip(p, q, strict=True) if pi > 0)
