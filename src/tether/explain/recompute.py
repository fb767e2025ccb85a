"""The inputs of the worked examples on PPO, put through the functions that train."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.advantages import gae
from tether.algo.kl import exact_kl, k1, k3
from tether.algo.losses import (
    PolicyLoss,
    clip_policy_loss,
    clip_value_loss,
    cpi_policy_loss,
    dual_clip,
    log_ratio,
    penalty_policy_loss,
    squared_value_loss,
)
from tether.algo.masked import masked_mean, masked_sum
from tether.algo.rewards import place_scores, shape_rewards
from tether.data.collate import length_mask
from tether.explain.recompute_kl import NATS_A_BIT, everywhere, flat, row
from tether.train.updates.minibatches import Walk, row_slices

# The prompt 你知道1+1=2吗？ and its response 是的，1+1=2: six tokens, beta 0.01, gamma 1.


OLD = row([-0.12, -0.08, -0.15, -0.10, -0.05, -0.02])
REF = row([-0.15, -0.10, -0.18, -0.12, -0.08, -0.03])
VALUES = row([0.82, 0.85, 0.88, 0.90, 0.92, 0.95])
MASK = torch.ones(1, 6, dtype=torch.bool)
BETA = 0.01
ILLUSTRATIVE = row([0.13, 0.10, 0.08, 0.05, 0.03, 0.05])


def old_probabilities() -> list[float]:
    return flat(OLD.exp())


def k1_tokens() -> list[float]:
    return flat(k1(OLD, REF, MASK))


def k3_tokens() -> list[float]:
    return flat(k3(OLD, REF, MASK))


def k1_sum_and_mean() -> list[float]:
    kl = k1(OLD, REF, MASK)
    return [float(masked_sum(kl, MASK)), float(masked_mean(kl, MASK))]


def token_level_rewards() -> list[float]:
    return flat(_rewards())


def advantages(lam: float) -> list[float]:
    """With lambda 0 they are delta."""
    return flat(_advantages(lam))


def returns(lam: float) -> list[float]:
    return flat(_advantages(lam) + VALUES)


def surrogates() -> list[float]:
    """L^CPI and the clipped objective of the illustrative advantages, where every ratio is 1."""
    losses = (
        cpi_policy_loss(OLD, OLD, ILLUSTRATIVE),
        clip_policy_loss(OLD, OLD, ILLUSTRATIVE, 0.2, 0.2),
    )
    return [-float(masked_mean(loss.per_token, MASK)) for loss in losses]


def illustrative_returns() -> list[float]:
    return flat(VALUES + ILLUSTRATIVE)


def needed_lambdas() -> list[float]:
    """The lambda that each of the first five illustrative advantages would need."""
    deltas, given = row(advantages(0.0)), ILLUSTRATIVE
    return flat((given[:, :-1] - deltas[:, :-1]) / given[:, 1:])


def row_objective() -> list[float]:
    """The score minus beta x the row's KL, by the sum of its rewards."""
    return [float(masked_sum(_rewards(), MASK))]


# What the first step of an update reports for that row: new and old policy are the same.


def value_losses() -> list[float]:
    """Half the mean squared error, and the whole of it."""
    loss = float(masked_mean(squared_value_loss(VALUES, VALUES + ILLUSTRATIVE).per_token, MASK))
    return [loss, 2 * loss]


def policy_loss() -> list[float]:
    return [float(masked_mean(_first_step().per_token, MASK))]


def clip_fractions() -> list[float]:
    """Of the critic (values held within 0.2 of the old ones), then of the actor."""
    value = clip_value_loss(VALUES, VALUES, VALUES + ILLUSTRATIVE, 0.2)
    policy = _first_step()
    clipped = value.clipped, policy.clipped_high | policy.clipped_low
    return [float(masked_mean(cells.double(), MASK)) for cells in clipped]


def approximate_kl() -> list[float]:
    """KL(old‖new) from old samples, e^x - x - 1 of the log-ratio x."""
    return [float(masked_mean(k3(OLD, OLD, MASK), MASK))]


def mean_surprisal() -> list[float]:
    """Mean -log pi_old: what the sampled tokens say about the entropy."""
    return [float(masked_mean(-OLD, MASK))]


def most_entropy(vocabulary: int) -> list[float]:
    """The largest mean entropy with these probabilities: all others share what is left evenly."""
    found = []
    for p in old_probabilities():
        rest = math.log(1 - p) - math.log(vocabulary - 1)
        found.append(-p * math.log(p) - (1 - p) * rest)
    return [math.fsum(found) / len(found)]


def equal_choices(entropy: float) -> list[float]:
    return [math.exp(entropy)]


def _first_step() -> PolicyLoss:
    return clip_policy_loss(OLD, OLD, ILLUSTRATIVE, 0.2, 0.2)


def _rewards() -> Float[Tensor, "1 tokens"]:
    scores = place_scores(torch.ones(1, dtype=torch.float64), MASK)
    return shape_rewards(scores, k1(OLD, REF, MASK), BETA)


def _advantages(lam: float) -> Float[Tensor, "1 tokens"]:
    ended = torch.zeros(1, dtype=torch.float64)
    return gae(_rewards(), VALUES, ended, MASK, 1.0, lam)


# One token of old probability 0.3.


def unclipped(ratio: float, advantage: float) -> list[float]:
    """The ratio and ratio x advantage."""
    loss = cpi_policy_loss(_log(0.3 * ratio), _log(0.3), row([advantage]))
    return [float(loss.ratio), -float(loss.per_token)]


def clipped(ratio: float, advantage: float, bound: float | None = None) -> list[float]:
    """The clipped objective, eps 0.2, and its gradient by log pi_new."""
    new = _log(0.3 * ratio).requires_grad_()
    loss = clip_policy_loss(new, _log(0.3), row([advantage]), 0.2, 0.2)
    if bound is not None:
        loss = dual_clip(loss, row([advantage]), bound)
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), new)
    return [-float(loss.per_token.detach()), -float(gradient)]


def lower_of_two(ratio: float, advantage: float) -> list[float]:
    """The loss, and the number that min(-A r, -A clip r) would give for it."""
    advantages = row([advantage])
    loss = clip_policy_loss(_log(0.3 * ratio), _log(0.3), advantages, 0.2, 0.2)
    held = -advantages * loss.ratio.clamp(0.8, 1.2)
    return [float(loss.per_token), float(torch.minimum(-advantages * loss.ratio, held))]


def ratio_of_row(ratio: float, tokens: int) -> list[float]:
    """The ratio of a whole response whose tokens all have this one."""
    old = torch.full((1, tokens), math.log(0.3), dtype=torch.float64)
    each = log_ratio(old + math.log(ratio), old)
    return [float(masked_sum(each, everywhere(each)).exp())]


def penalised() -> list[float]:
    """KL(old‖new) of 0.3 -> 0.6, and PPO-Penalty's loss for A = 1 with coefficient 1."""
    kl = exact_kl((0.3, 0.7), (0.6, 0.4))
    loss = penalty_policy_loss(_log(0.6), _log(0.3), row([1.0]), row([kl]), 1.0)
    return [kl, float(loss.per_token)]


def kl_and_reward(old: float, ref: float, beta: float) -> list[float]:
    """k1 and score - beta x k1, the score being 1."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    kl = k1(_log(old), _log(ref), mask)
    score = place_scores(torch.ones(1, dtype=torch.float64), mask)
    return [float(kl), float(shape_rewards(score, kl, beta))]


def log_ratio_in_nats_and_bits(p: float, q: float) -> list[float]:
    nats, _ = kl_and_reward(p, q, beta=0.0)
    return [nats, nats / NATS_A_BIT]


def _log(p: float) -> Float[Tensor, "1 1"]:
    return row([math.log(p)])


# Counting.


def sequence_lengths() -> list[float]:
    """Prompt, response and the whole of a row, as masks count them."""
    lengths = torch.tensor([8, 6])
    counted = length_mask(lengths, 14).sum(dim=1)
    return [*counted.double().tolist(), float(counted.sum())]


def optimizer_steps(rows: int, minibatch_rows: int, epochs: int) -> list[float]:
    """Counted by walking the slices as an update does."""
    walk = Walk("actor", 0, 0, epochs, minibatch_rows, 1, "token_mean", 1)
    return [float(sum(1 for _ in row_slices(rows, walk)))]
