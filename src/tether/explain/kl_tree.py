"""Test which KL estimator is right for responses of two tokens, on a tree whose optimum is known.

A policy over three first tokens and three second ones after each is trained on reward r of the
leaf with a KL to the reference of weight beta. The optimum over responses is pi* ~ pi_ref exp(r /
beta), as in `kl_bandit`, which is this tree cut down to one token. What is new is that a first
token also decides in which state the second token's KL is paid. Write q_t for log pi - log pi_ref
of token t. The true gradient of the KL is

    E[ sum_t grad log pi_t * (q_t + q_t+1 + ...) ]

A KL per token in the loss, whose states are fixed, has E[ sum_t grad log pi_t * q_t ] at best: the
first token is not charged for what follows. Its fixed point is known too: `partial_optimum`.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tether.algo.advantages import gae, place_scores, shape_rewards
from tether.algo.kl import estimate_kl, full_kl, sequence_k2
from tether.algo.losses import LossInputs, log_ratio, policy_loss, squared_value_loss
from tether.algo.masked import cell_weights, weighted_sum
from tether.algo.random import permutation, uniform
from tether.config import ClipUpdate
from tether.rollout.token_choice import inverse_cdf

FIRST = torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)
SECOND = torch.tensor([[0.1, 0.3, 0.6], [0.3, 0.4, 0.3], [0.2, 0.5, 0.3]], dtype=torch.float64)
REWARDS = torch.tensor(
    [
        [[1.2, 0.2, -0.6], [0.5, 0.45, 0.4], [-0.4, 0.3, 0.9]],
        [[-0.5, 0.9, -0.2], [0.3, 0.3, 0.35], [1.1, -0.7, 0.1]],
    ],
    dtype=torch.float64,
)
BETAS = torch.tensor([0.3, 0.6], dtype=torch.float64)
# Four trees: every reward table with every beta.
LEAF_REWARDS, BETA = REWARDS.repeat_interleave(2, dim=0), BETAS.repeat(2)
REF_LOG = (FIRST.log()[:, None].expand(3, 3), SECOND.log())  # of token t on every leaf

SAMPLES, ITERATIONS, EPOCHS, MINIBATCHES, LR = 512, 400, 4, 4, 0.02
CLIP = ClipUpdate(eps_low=0.2, eps_high=0.2)
TREE = torch.arange(4).repeat_interleave(SAMPLES)  # of each row
MASK = torch.ones(4 * SAMPLES, 2, dtype=torch.bool)

Place = Literal["reward", "loss, plain", "loss, by ratio", "loss, sequence"]
Verdict = Literal["right", "partial", "wrong"]


@dataclass(frozen=True)
class TreeCell:
    """A KL estimator in a place, and what theory says: partial is right for one token only."""

    place: Place
    estimator: str
    verdict: Verdict


SAMPLED = ("k1", "abs", "k2", "k3", "k1+", "k3+")
RIGHT: dict[Place, tuple[str, ...]] = {"reward": ("k1", "k1+"), "loss, sequence": ("k2",)}
PARTIAL: dict[Place, tuple[str, ...]] = {
    "loss, plain": ("k2", "full", "k1+", "k3+"),
    "loss, by ratio": ("k1", "k3"),
}


def _verdict(place: Place, estimator: str) -> Verdict:
    if estimator in RIGHT.get(place, ()):
        return "right"
    return "partial" if estimator in PARTIAL.get(place, ()) else "wrong"


ESTIMATORS: dict[Place, tuple[str, ...]] = {
    "reward": (*SAMPLED, "full"),
    "loss, plain": (*SAMPLED, "full"),
    "loss, by ratio": SAMPLED,  # full has no sampled token, so no ratio
    "loss, sequence": ("k2",),
}
CELLS = [
    TreeCell(place, estimator, _verdict(place, estimator))
    for place, estimators in ESTIMATORS.items()
    for estimator in estimators
]


@dataclass(frozen=True)
class TreePolicy:
    """The four policies: logits of the first token, and of the second after each first."""

    first: Float[Tensor, "4 3"]
    second: Float[Tensor, "4 3 3"]

    def log_probs(self) -> tuple[Float[Tensor, "4 3 3"], Float[Tensor, "4 3 3"]]:
        """Return the log-probs of both tokens of every leaf."""
        first = torch.log_softmax(self.first, dim=-1)
        return first[:, :, None].expand(4, 3, 3), torch.log_softmax(self.second, dim=-1)

    def leaves(self) -> Float[Tensor, "4 3 3"]:
        """Return the probability of every leaf."""
        first, second = self.log_probs()
        return (first + second).exp()


def optimum() -> TreePolicy:
    """Return pi* of each tree: the second token by its reward, the first by what follows it."""
    second = SECOND.log() + LEAF_REWARDS / BETA[:, None, None]
    return TreePolicy(FIRST.log() + second.logsumexp(dim=-1), second)


def partial_optimum() -> TreePolicy:
    """Return the fixed point of a KL per token with fixed states.

    The second token is as in pi*. The first sees the mean reward that follows it, and not the KL
    that earning this reward costs: pi(a) ~ pi*(a) exp(KL of the second token after a).
    """
    second = optimum().second
    mean = (torch.softmax(second, dim=-1) * LEAF_REWARDS).sum(dim=-1)
    return TreePolicy(FIRST.log() + mean / BETA[:, None], second)


def distances(one: TreePolicy, other: TreePolicy) -> list[float]:
    """Return the total variation over leaves of each of the four trees."""
    return (0.5 * (one.leaves() - other.leaves()).abs().sum(dim=(1, 2))).tolist()


def mean_objective(cell: TreeCell, policy: TreePolicy) -> Float[Tensor, " 4"]:
    """Return a number whose gradient is what the cell follows on average, over all leaves.

    The tokens are the policy's own, so every ratio is 1 and nothing is clipped: where this gradient
    is 0, training stands still.
    """
    log_probs = policy.log_probs()
    weights, beta = policy.leaves().detach(), BETA[:, None, None]
    ref = [x.expand(4, 3, 3) for x in REF_LOG]
    mask = torch.ones(4, 3, 3, dtype=torch.bool)
    kls = [_leaf_kl(cell, policy, t, log_probs[t], ref[t], mask) for t in range(2)]
    to_go = [LEAF_REWARDS, LEAF_REWARDS]
    if cell.place == "reward":
        paid = [beta * kl.detach() for kl in kls]
        to_go = [LEAF_REWARDS - paid[0] - paid[1], LEAF_REWARDS - paid[1]]
    objective = sum(log_probs[t] * to_go[t].detach() for t in range(2))
    if cell.place == "loss, sequence":
        objective = objective - beta * 0.5 * sum(log_probs[t] - ref[t] for t in range(2)) ** 2
    elif cell.place != "reward":
        ratios = [1.0 if cell.place == "loss, plain" else (x - x.detach()).exp() for x in log_probs]
        objective = objective - beta * sum(kls[t] * ratios[t] for t in range(2))
    return (weights * objective).sum(dim=(1, 2))


def _leaf_kl(
    cell: TreeCell, policy: TreePolicy, token: int, log_probs: Tensor, ref: Tensor, mask: Tensor
) -> Float[Tensor, "4 3 3"]:
    if cell.estimator != "full":
        return estimate_kl(cell.estimator, log_probs, ref, mask)
    return _full(policy)[token].expand(4, 3, 3)


def _full(policy: TreePolicy) -> tuple[Float[Tensor, "4 1 1"], Float[Tensor, "4 3 1"]]:
    """Return the exact KL of the first token, and of the second after each first."""
    first, second = policy.log_probs()
    one = full_kl(first[:, :, 0], FIRST.log().expand(4, 3))
    return one[:, None, None], full_kl(second, SECOND.log().expand(4, 3, 3))[..., None]


def largest_gradient(cell: TreeCell, policy: TreePolicy) -> float:
    """Return the largest component of the mean gradient: 0 at a fixed point."""
    with torch.enable_grad():
        first, second = (x.detach().clone().requires_grad_() for x in (policy.first, policy.second))
        mean_objective(cell, TreePolicy(first, second)).sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    return max(float(first.grad.abs().max()), float(second.grad.abs().max()))


def solve(cell: TreeCell, steps: int = 3000) -> TreePolicy:
    """Follow the mean gradient from the reference; where no interior point is fixed, far enough to
    see which tokens it drives out."""
    first = FIRST.log().repeat(4, 1).requires_grad_()
    second = SECOND.log().repeat(4, 1, 1).requires_grad_()
    adam = torch.optim.Adam([first, second], lr=0.05)
    for step in range(steps):
        adam.param_groups[0]["lr"] = 0.05 * (1 - step / steps)
        adam.zero_grad()
        (-mean_objective(cell, TreePolicy(first, second)).sum()).backward()
        adam.step()
    return TreePolicy(first.detach(), second.detach())


def train(cell: TreeCell, iterations: int = ITERATIONS) -> TreePolicy:
    """Train by PPO-Clip from samples, with a critic value per state; return the final policies."""
    first = FIRST.log().repeat(4, 1).requires_grad_()
    second = SECOND.log().repeat(4, 1, 1).requires_grad_()
    critic = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)  # before, after each first
    adam = torch.optim.Adam([first, second, critic], lr=LR)
    for iteration in range(iterations):
        adam.param_groups[0]["lr"] = LR * (1 - iteration / iterations)
        policy = TreePolicy(first, second)
        with torch.no_grad():
            batch = _sample(cell, policy, critic, iteration)
        for epoch in range(EPOCHS):
            order = permutation(len(TREE), 0, "tree", iteration, epoch)
            for rows in order.chunk(MINIBATCHES):
                adam.zero_grad()
                _loss(cell, policy, critic, batch, rows).backward()
                adam.step()
    return TreePolicy(first.detach(), second.detach())


@dataclass(frozen=True)
class _Batch:
    tokens: Int[Tensor, "rows 2"]
    old: Float[Tensor, "rows 2"]
    ref: Float[Tensor, "rows 2"]
    advantages: Float[Tensor, "rows 2"]
    returns: Float[Tensor, "rows 2"]


def _read(policy: TreePolicy, tree: Tensor, tokens: Tensor) -> Float[Tensor, "rows 2"]:
    a, b = tokens[:, 0], tokens[:, 1]
    return torch.stack([x[tree, a, b] for x in policy.log_probs()], dim=1)


def _values(critic: Tensor, tree: Tensor, tokens: Tensor) -> Float[Tensor, "rows 2"]:
    return torch.stack([critic[tree, 0], critic[tree, 1 + tokens[:, 0]]], dim=1)


def _row_full(policy: TreePolicy, tree: Tensor, tokens: Tensor) -> Float[Tensor, "rows 2"]:
    first, second = _full(policy)
    return torch.stack([first[tree, 0, 0], second[tree, tokens[:, 0], 0]], dim=1)


def _sample(cell: TreeCell, policy: TreePolicy, critic: Tensor, iteration: int) -> _Batch:
    rows = np.arange(len(TREE))
    draws = [uniform(0, "tree", iteration, rows, np.full_like(rows, t)) for t in range(2)]
    a = inverse_cdf(torch.softmax(policy.first, dim=-1)[TREE], draws[0])
    b = inverse_cdf(torch.softmax(policy.second, dim=-1)[TREE, a], draws[1])
    tokens = torch.stack([a, b], dim=1)
    old, ref = _read(policy, TREE, tokens), torch.stack([x[a, b] for x in REF_LOG], dim=1)
    rewards = place_scores(LEAF_REWARDS[TREE, a, b], MASK)
    if cell.place == "reward":
        full = cell.estimator == "full"
        kl = (
            _row_full(policy, TREE, tokens) if full else estimate_kl(cell.estimator, old, ref, MASK)
        )
        # Beta differs from tree to tree, so it is folded into the penalty.
        rewards = shape_rewards(rewards, BETA[TREE, None] * kl, 1.0)
    values = _values(critic, TREE, tokens)
    after = torch.zeros(len(TREE), dtype=torch.float64)
    advantages = gae(rewards, values, after, MASK, 1.0, 1.0)
    return _Batch(tokens, old, ref, advantages, advantages + values)


def _loss(
    cell: TreeCell, policy: TreePolicy, critic: Tensor, batch: _Batch, rows: Tensor
) -> Float[Tensor, ""]:
    tree, tokens, mask = TREE[rows], batch.tokens[rows], MASK[rows]
    new, old, ref = _read(policy, tree, tokens), batch.old[rows], batch.ref[rows]
    loss = policy_loss(CLIP, LossInputs(new, old, batch.advantages[rows], mask)).per_token
    values = _values(critic, tree, tokens)
    loss = loss + squared_value_loss(values, batch.returns[rows]).per_token
    if cell.place == "loss, sequence":
        loss = loss + BETA[tree, None] * sequence_k2(new, old, ref, mask)
    elif cell.place != "reward":
        if cell.estimator == "full":
            kl = _row_full(policy, tree, tokens)
        else:
            kl = estimate_kl(cell.estimator, new, ref, mask)
        if cell.place == "loss, by ratio":
            kl = kl * log_ratio(new, old).exp()
        loss = loss + BETA[tree, None] * kl
    return weighted_sum(loss, cell_weights("seq_mean_token_sum", mask, 2, loss.dtype))
