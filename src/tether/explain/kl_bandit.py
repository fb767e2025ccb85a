"""Test which KL estimator is right in which place, on a bandit whose optimum is known.

A policy over five arms, one token long, is trained by PPO-Clip on reward r with a KL to the
reference of weight beta. The optimum is known: pi* ~ pi_ref exp(r / beta). Each `Cell` is an
estimator in a place: in the reward, plain in the loss, or in the loss weighted by the
differentiated ratio. Every cell is trained on two reward vectors with two betas each, and the
total variation to pi* says whether it is right.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tether.algo.advantages import gae, place_scores, shape_rewards
from tether.algo.kl import estimate_kl, full_kl
from tether.algo.losses import LossInputs, log_ratio, policy_loss, squared_value_loss
from tether.algo.masked import cell_weights, weighted_sum
from tether.algo.random import permutation, uniform
from tether.config import ClipUpdate
from tether.rollout.token_choice import inverse_cdf

REFERENCE = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1], dtype=torch.float64)
REWARDS = torch.tensor([[1, 0.5, 0, -0.5, -1], [-0.6, 0.9, 0.1, 0.4, -0.2]], dtype=torch.float64)
BETAS = torch.tensor([0.3, 0.6], dtype=torch.float64)
# Four bandits: every reward vector with every beta.
ARM_REWARDS, BETA = REWARDS.repeat_interleave(2, dim=0), BETAS.repeat(2)

SAMPLES, ITERATIONS, EPOCHS, MINIBATCHES, LR = 256, 400, 4, 4, 0.02
CLIP = ClipUpdate(eps_low=0.2, eps_high=0.2)
MASK = torch.ones(4 * SAMPLES, 1, dtype=torch.bool)
BANDIT = torch.arange(4).repeat_interleave(SAMPLES)  # of each row

Place = Literal["reward", "loss, plain", "loss, by ratio"]


@dataclass(frozen=True)
class Cell:
    """A KL estimator in a place, and whether theory calls the combination right."""

    place: Place
    estimator: str
    right: bool


SAMPLED = ("k1", "abs", "k2", "k3", "k1+", "k3+")
RIGHT: dict[Place, tuple[str, ...]] = {
    "reward": ("k1", "k1+"),
    "loss, plain": ("k2", "full", "k1+", "k3+"),
    "loss, by ratio": ("k1", "k3"),  # full has no sampled token, so no ratio
}
CELLS = [
    Cell(place, estimator, estimator in right)
    for place, right in RIGHT.items()
    for estimator in (*SAMPLED, *(("full",) if place != "loss, by ratio" else ()))
]


def optimum() -> Float[Tensor, "4 5"]:
    """Return pi* of each of the four bandits."""
    return torch.softmax(REFERENCE.log() + ARM_REWARDS / BETA[:, None], dim=-1)


def distances(cell: Cell, iterations: int = ITERATIONS) -> list[float]:
    """Train, and return the total variation to the optimum for each of the four bandits."""
    return (0.5 * (train(cell, iterations) - optimum()).abs().sum(dim=-1)).tolist()


def train(cell: Cell, iterations: int = ITERATIONS) -> Float[Tensor, "4 5"]:
    """Train by PPO-Clip with one critic value per bandit; return the four final policies."""
    logits = REFERENCE.log().repeat(4, 1).requires_grad_()
    critic = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([logits, critic], lr=LR)
    for iteration in range(iterations):
        adam.param_groups[0]["lr"] = LR * (1 - iteration / iterations)
        with torch.no_grad():
            batch = _sample(cell, logits, critic, iteration)
        for epoch in range(EPOCHS):
            order = permutation(len(BANDIT), 0, "bandit", iteration, epoch)
            for rows in order.chunk(MINIBATCHES):
                adam.zero_grad()
                _loss(cell, logits, critic, batch, rows).backward()
                adam.step()
    return torch.softmax(logits.detach(), dim=-1)


@dataclass(frozen=True)
class _Batch:
    arms: Int[Tensor, "rows 1"]
    old: Float[Tensor, "rows 1"]
    ref: Float[Tensor, "rows 1"]
    advantages: Float[Tensor, "rows 1"]
    returns: Float[Tensor, "rows 1"]


def _sample(cell: Cell, logits: Tensor, critic: Tensor, iteration: int) -> _Batch:
    log_probs = torch.log_softmax(logits, dim=-1)
    u = uniform(0, "bandit", iteration, np.arange(len(BANDIT)))
    arms = inverse_cdf(log_probs[BANDIT].exp(), u)[:, None]
    old, ref = log_probs[BANDIT].gather(1, arms), REFERENCE.log()[arms]
    rewards = place_scores(ARM_REWARDS[BANDIT].gather(1, arms).squeeze(1), MASK)
    if cell.place == "reward":
        kl = _exact(log_probs)[BANDIT, None] if cell.estimator == "full" else None
        kl = estimate_kl(cell.estimator, old, ref, MASK) if kl is None else kl
        # Beta differs from bandit to bandit, so it is folded into the penalty.
        rewards = shape_rewards(rewards, BETA[BANDIT, None] * kl, 1.0)
    values = critic[BANDIT, None]
    after = torch.zeros(len(BANDIT), dtype=torch.float64)
    advantages = gae(rewards, values, after, MASK, 1.0, 1.0)
    return _Batch(arms, old, ref, advantages, advantages + values)


def _loss(cell: Cell, logits: Tensor, critic: Tensor, batch: _Batch, rows: Tensor) -> Tensor:
    bandit, mask = BANDIT[rows], MASK[rows]
    log_probs = torch.log_softmax(logits, dim=-1)
    new, old = log_probs[bandit].gather(1, batch.arms[rows]), batch.old[rows]
    loss = policy_loss(CLIP, LossInputs(new, old, batch.advantages[rows], mask)).per_token
    loss = loss + squared_value_loss(critic[bandit, None], batch.returns[rows]).per_token
    if cell.place != "reward":
        if cell.estimator == "full":
            kl = _exact(log_probs)[bandit, None]
        else:
            kl = estimate_kl(cell.estimator, new, batch.ref[rows], mask)
        if cell.place == "loss, by ratio":
            kl = kl * log_ratio(new, old).exp()
        loss = loss + BETA[bandit, None] * kl
    return weighted_sum(loss, cell_weights("token_mean", mask, 1, loss.dtype))


def _exact(log_probs: Float[Tensor, "4 5"]) -> Float[Tensor, " 4"]:
    return full_kl(log_probs, REFERENCE.log().expand(4, -1))
