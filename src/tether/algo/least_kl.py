"""The least KL to the reference that any policy needs for a mean score, from samples of the
reference."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

NUM_TILTS = 1201
MAX_TILT = 60.0  # a score of the whole range weighs e^60 times more: the best samples alone


def tilts(scores: Float[Tensor, "prompts samples"]) -> Float[Tensor, " tilts"]:
    """Return the values of eta that are tried: from 0, denser near it, in units of the scores."""
    spread = float(scores.max() - scores.min()) or 1.0
    return MAX_TILT / spread * torch.linspace(0, 1, NUM_TILTS, dtype=torch.float64) ** 2


def log_moments(
    scores: Float[Tensor, "prompts samples"],
    known: Bool[Tensor, "prompts samples"],
    etas: Float[Tensor, " tilts"],
) -> Float[Tensor, "prompts tilts"]:
    """Return ln E e^(eta r) of every prompt, from its scores that are known.

    The logarithm of a mean of n samples is too small by var / (2 n mean^2) to first order, which
    would make the least KL too large, so that much is added.
    """
    count = known.sum(dim=1)
    found = []
    for eta in etas.split(64):  # prompts x samples x tilts would be large
        tilted = scores.double()[:, :, None] * eta
        top = torch.where(known[:, :, None], tilted, -torch.inf).amax(dim=1, keepdim=True)
        weights = torch.where(known[:, :, None], (tilted - top).exp(), 0.0)
        mean = weights.sum(dim=1) / count[:, None]
        spread = torch.where(known[:, :, None], (weights - mean[:, None]) ** 2, 0.0).sum(dim=1)
        variance = spread / (count[:, None] - 1)
        bias = variance / (2 * count[:, None] * mean**2)
        found.append(mean.log() + top.squeeze(1) + bias)
    return torch.cat(found, dim=1)


def least_kl(
    score: Float[Tensor, " many"],
    mean_log_moments: Float[Tensor, "many tilts"],
    etas: Float[Tensor, " tilts"],
) -> Float[Tensor, " many"]:
    """Return the least mean KL(policy || reference), in nats, of policies with at least this mean
    score: sup over eta >= 0 of eta score - mean over prompts of ln E e^(eta r).

    It is the KL of the reference tilted by e^(eta r), with one eta for all prompts, so it is
    attained, and by pi* ~ pi_ref e^(r / beta) with eta = 1 / beta. Infinite where it still rises
    at the largest eta: no mixture of the samples has that score.

    The variational formula of Donsker and Varadhan 1975; Boucheron, Lugosi and Massart 2013,
    *Concentration Inequalities*, section 4.9.
    """
    gains = score[:, None] * etas - mean_log_moments
    still_rises = gains[:, -1] - gains[:, -2] > 1e-9
    return torch.where(still_rises, torch.inf, gains.amax(dim=1).clamp(min=0.0))
