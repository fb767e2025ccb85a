"""The worked examples' inputs, put through the functions that train."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.advantages import gae
from tether.algo.kl import exact_kl, k1, k3
from tether.algo.losses import clip_policy_loss, cpi_policy_loss, dual_clip
from tether.algo.masked import masked_mean, masked_sum
from tether.algo.rewards import place_scores, shape_rewards
from tether.train.updates.minibatches import Walk, row_slices

NATS_A_BIT = math.log(2)

# P and Q of each exact KL.
DISTRIBUTIONS = {
    "die": ((1 / 6,) * 6, (0.1,) * 5 + (0.5,)),
    "coin": ((0.8, 0.2), (0.7, 0.3)),
    "tokens": ((0.3, 0.4, 0.3), (0.5, 0.3, 0.2)),
    "tokens_again": ((0.6, 0.3, 0.1), (0.7, 0.2, 0.1)),
    "weather": ((0.7, 0.2, 0.1), (0.5, 0.3, 0.2)),
    "forecaster": ((0.8, 0.2), (0.9, 0.1)),
    "mild": ((0.4, 0.3, 0.2, 0.1), (0.45, 0.35, 0.15, 0.05)),
    "wild": ((0.4, 0.3, 0.2, 0.1), (0.8, 0.1, 0.05, 0.05)),
    "grades": ((0.1, 0.3, 0.4, 0.2), (0.05, 0.25, 0.5, 0.2)),
}


def kl_both_ways(name: str) -> list[float]:
    p, q = DISTRIBUTIONS[name]
    forwards, backwards = exact_kl(p, q), exact_kl(q, p)
    return [forwards, forwards / NATS_A_BIT, backwards, backwards / NATS_A_BIT]


def weather_code_lengths() -> list[float]:
    """Entropy of P by its distance from even odds; cross-entropy is KL more."""
    p, q = DISTRIBUTIONS["weather"]
    entropy = math.log(3) - exact_kl(p, (1 / 3,) * 3)
    return [entropy / NATS_A_BIT, (entropy + exact_kl(p, q)) / NATS_A_BIT]


def sampled_k1() -> list[float]:
    """Tokens search, think, answer, search: log(current / reference)."""
    reference, current = (_row(p).log()[:, [0, 1, 2, 0]] for p in DISTRIBUTIONS["tokens_again"])
    return _flat(k1(current, reference, torch.ones(1, 4, dtype=torch.bool)))


# The prompt 你知道1+1=2吗？ and its response 是的，1+1=2: six tokens, beta 0.01, gamma 1.


def _row(numbers: Sequence[float]) -> Float[Tensor, "1 tokens"]:
    return torch.tensor([list(numbers)], dtype=torch.float64)


def _flat(x: Tensor) -> list[float]:
    return x.flatten().tolist()


OLD = _row([-0.12, -0.08, -0.15, -0.10, -0.05, -0.02])
REF = _row([-0.15, -0.10, -0.18, -0.12, -0.08, -0.03])
VALUES = _row([0.82, 0.85, 0.88, 0.90, 0.92, 0.95])
MASK = torch.ones(1, 6, dtype=torch.bool)
BETA = 0.01
ILLUSTRATIVE = _row([0.13, 0.10, 0.08, 0.05, 0.03, 0.05])


def old_probabilities() -> list[float]:
    return _flat(OLD.exp())


def k1_tokens() -> list[float]:
    return _flat(k1(OLD, REF, MASK))


def k3_tokens() -> list[float]:
    return _flat(k3(OLD, REF, MASK))


def k1_sum_and_mean() -> list[float]:
    kl = k1(OLD, REF, MASK)
    return [float(masked_sum(kl, MASK)), float(masked_mean(kl, MASK))]


def token_level_rewards() -> list[float]:
    return _flat(_rewards())


def advantages(lam: float) -> list[float]:
    """With lambda 0 they are delta."""
    return _flat(_advantages(lam))


def returns(lam: float) -> list[float]:
    return _flat(_advantages(lam) + VALUES)


def surrogates() -> list[float]:
    """L^CPI and the clipped objective of the illustrative advantages, where every ratio is 1."""
    losses = (
        cpi_policy_loss(OLD, OLD, ILLUSTRATIVE),
        clip_policy_loss(OLD, OLD, ILLUSTRATIVE, 0.2, 0.2),
    )
    return [-float(masked_mean(loss.per_token, MASK)) for loss in losses]


def _rewards() -> Float[Tensor, "1 tokens"]:
    scores = place_scores(torch.ones(1, dtype=torch.float64), MASK)
    return shape_rewards(scores, k1(OLD, REF, MASK), BETA)


def _advantages(lam: float) -> Float[Tensor, "1 tokens"]:
    ended = torch.zeros(1, dtype=torch.float64)
    return gae(_rewards(), VALUES, ended, MASK, 1.0, lam)


# One token of old probability 0.3.


def unclipped(ratio: float, advantage: float) -> list[float]:
    """The ratio and ratio x advantage."""
    loss = cpi_policy_loss(_log(0.3 * ratio), _log(0.3), _row([advantage]))
    return [float(loss.ratio), -float(loss.per_token)]


def clipped(ratio: float, advantage: float, bound: float | None = None) -> list[float]:
    """The clipped objective, eps 0.2, and its gradient by log pi_new."""
    new = _log(0.3 * ratio).requires_grad_()
    loss = clip_policy_loss(new, _log(0.3), _row([advantage]), 0.2, 0.2)
    if bound is not None:
        loss = dual_clip(loss, _row([advantage]), bound)
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), new)
    return [-float(loss.per_token.detach()), -float(gradient)]


def kl_and_reward(old: float, ref: float, beta: float) -> list[float]:
    """k1 and score - beta x k1, the score being 1."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    kl = k1(_log(old), _log(ref), mask)
    score = place_scores(torch.ones(1, dtype=torch.float64), mask)
    return [float(kl), float(shape_rewards(score, kl, beta))]


def log_ratio_in_nats_and_bits(p: float, q: float) -> list[float]:
    nats, _ = kl_and_reward(p, q, beta=0.0)
    return [nats, nats / NATS_A_BIT]


def surprisal_bits(p: float) -> list[float]:
    """KL from being sure of an outcome that had probability p."""
    return [exact_kl((1.0, 0.0), (p, 1 - p)) / NATS_A_BIT]


def optimizer_steps(rows: int, minibatch_rows: int, epochs: int) -> list[float]:
    """Counted by walking the slices as an update does."""
    walk = Walk("actor", 0, 0, epochs, minibatch_rows, 1, "token_mean", 1)
    return [float(sum(1 for _ in row_slices(rows, walk)))]


def _log(p: float) -> Float[Tensor, "1 1"]:
    return _row([math.log(p)])
