"""The inputs of the worked examples, computed by the functions that train.

Every function returns the numbers of one example, in the order in which they are shown.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.advantages import gae, place_scores, shape_rewards
from tether.algo.kl import estimate_kl, exact_kl, k1, k3
from tether.algo.losses import (
    LossInputs,
    PolicyLoss,
    clip_value_loss,
    log_ratio,
    policy_loss,
    squared_value_loss,
)
from tether.algo.masked import masked_mean, masked_sum, weighted_sum
from tether.config.algorithm import AnyUpdate, ClipUpdate, CpiUpdate, PenaltyUpdate
from tether.data.batching import length_mask
from tether.ppo.updates.minibatches import MinibatchSchedule, row_slices

NATS_PER_BIT = math.log(2)


def row(numbers: Sequence[float]) -> Float[Tensor, "1 tokens"]:
    return torch.tensor([list(numbers)], dtype=torch.float64)


def flat(x: Tensor) -> list[float]:
    return x.flatten().tolist()


def everywhere(x: Tensor) -> Bool[Tensor, "1 tokens"]:
    return torch.ones_like(x, dtype=torch.bool)


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
    "kept": ((0.9, 0.1), (0.9, 0.1)),
    "turned": ((0.9, 0.1), (0.1, 0.9)),
    "ruled_out": ((0.5, 0.5), (1.0, 0.0)),
}


def kl_both_ways(name: str) -> list[float]:
    """Compute KL(P‖Q) in nats and bits, then KL(Q‖P)."""
    p, q = DISTRIBUTIONS[name]
    forwards, backwards = exact_kl(p, q), exact_kl(q, p)
    return [forwards, forwards / NATS_PER_BIT, backwards, backwards / NATS_PER_BIT]


def kl_terms(name: str) -> list[float]:
    """Compute P·ln(P/Q), outcome by outcome."""
    p, q = map(row, DISTRIBUTIONS[name])
    return flat(p * k1(p.log(), q.log(), everywhere(p)))


def kl_terms_backwards(name: str) -> list[float]:
    """Compute Q·ln(Q/P), outcome by outcome."""
    p, q = map(row, DISTRIBUTIONS[name])
    return flat(q * k1(q.log(), p.log(), everywhere(q)))


def log_probabilities(numbers: Sequence[float]) -> list[float]:
    return flat(row(numbers).log())


# A code for the weather P, optimal for P or for a wrong belief Q.


def weather_code_lengths() -> list[float]:
    """Compute the entropy of P as ln 3 - KL(P‖uniform), and the cross-entropy, in bits."""
    p, q = DISTRIBUTIONS["weather"]
    entropy = math.log(3) - exact_kl(p, (1 / 3,) * 3)
    return [entropy / NATS_PER_BIT, (entropy + exact_kl(p, q)) / NATS_PER_BIT]


def weather_prefix_code() -> list[float]:
    """Compute the mean bits under P of the best code for P, of that for Q, and the difference."""
    p, q = DISTRIBUTIONS["weather"]
    own, other = (float(weighted_sum(row(huffman_lengths(x)), row(p))) for x in (p, q))
    return [own, other, other - own]


def huffman_lengths(p: Sequence[float]) -> list[int]:
    """Compute the length of each outcome's word in the best code with words of whole bits."""
    lengths = [0] * len(p)
    heap = [(weight, [i]) for i, weight in enumerate(p)]
    while len(heap) > 1:
        (first, ones), (second, others), *heap = sorted(heap)
        for i in (*ones, *others):
            lengths[i] += 1
        heap.append((first + second, ones + others))
    return lengths


def weather_ideal_lengths() -> list[float]:
    """Compute the bits of each outcome in the ideal code for Q."""
    return [surprisal_bits(p)[0] for p in DISTRIBUTIONS["weather"][1]]


# Tokens search, think, answer, search of the reference and the current policy.


def sampled_k1() -> list[float]:
    """Compute log(current / reference) of the four tokens."""
    reference, current = (row(p).log()[:, [0, 1, 2, 0]] for p in DISTRIBUTIONS["tokens_again"])
    return flat(k1(current, reference, everywhere(current)))


def sampled_mean() -> list[float]:
    numbers = row(sampled_k1())
    return [float(masked_mean(numbers, everywhere(numbers)))]


def expected_estimates() -> list[float]:
    """Compute the expectations of k1, k2 and k3 under the current policy."""
    reference, current = map(row, DISTRIBUTIONS["tokens_again"])
    arguments = current.log(), reference.log(), everywhere(current)
    return [float(weighted_sum(estimate_kl(k, *arguments), current)) for k in ("k1", "k2", "k3")]


def held_k3() -> list[float]:
    """Compute the mean of k3 for P = 0.01, 0.99 and Q = 0.5, 0.5, and with k3 clamped to ±10."""
    p, q = row([0.01, 0.99]), row([0.5, 0.5])
    values = k3(p.log(), q.log(), everywhere(p))
    return [float(weighted_sum(x, p)) for x in (values, values.clamp(-10, 10))]


def biases_of_estimators(mean: float) -> list[float]:
    """Compute (mean − KL) / KL of k1, k2, k3 for draws from N(0, 1) against N(mean, 1)."""
    kl = mean**2 / 2
    # Rounded, so that what the quadrature leaves of a 0 has no sign.
    return [round((first - kl) / kl, 12) + 0.0 for first, _ in _moments_of_estimators(mean)]


def spreads_of_estimators(mean: float) -> list[float]:
    """Compute the standard deviation / KL of k1, k2, k3, likewise.

    Schulman 2020, *Approximating KL Divergence*, has both rounded, from samples. In closed form:
    biases 0, mean²/4, 0; spreads 2/mean, √(2 + mean²), 2·√(e^mean² − 1 − mean²)/mean².
    """
    kl = mean**2 / 2
    return [math.sqrt(second - first**2) / kl for first, second in _moments_of_estimators(mean)]


def _moments_of_estimators(mean: float) -> list[tuple[float, float]]:
    """Return the mean and the mean square of k1, k2, k3 over N(0, 1), by Gauss's quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    share = torch.from_numpy(weights / weights.sum())
    x = torch.from_numpy(nodes)[None]
    moments = []
    for name in ("k1", "k2", "k3"):
        # Two log-densities of the normal distribution, without the constant that both have.
        estimate = estimate_kl(name, -(x**2) / 2, -((x - mean) ** 2) / 2, everywhere(x))
        moments.append((float((estimate @ share)[0]), float((estimate**2 @ share)[0])))
    return moments


def sequence_kl() -> list[float]:
    """Compute the sum of four tokens' k1 in nats and in bits, and their mean in nats."""
    kl = row([0.1, 0.5, 0.2, -0.1])
    total = float(masked_sum(kl, everywhere(kl)))
    return [total, total / NATS_PER_BIT, float(masked_mean(kl, everywhere(kl)))]


# Surprisal, in bits.


def surprisal_bits(p: float) -> list[float]:
    """Compute -log2 p, as the KL between certainty and a probability of p."""
    return [exact_kl((1.0, 0.0), (p, 1 - p)) / NATS_PER_BIT]


def surprisal_differences(name: str) -> list[float]:
    """Compute the surprisal under Q minus that under P per outcome, and its mean under P."""
    p, q = map(row, DISTRIBUTIONS[name])
    differences = k1(p.log(), q.log(), everywhere(p)) / NATS_PER_BIT
    return [*flat(differences), float(weighted_sum(differences, p))]


# How much may change within a bound on the KL.


def distance_and_kl(name: str) -> list[float]:
    """Compute the total variation (the largest change of an event's probability) and KL(P‖Q)."""
    p, q = DISTRIBUTIONS[name]
    return [math.fsum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2, exact_kl(p, q)]


def kl_of_keeping(share: float) -> list[float]:
    """Compute the largest KL(old‖new) of a new policy that agrees with old in `share` of cases."""
    return [exact_kl((1.0, 0.0), (share, 1 - share))]


def largest_changes(bounds: Sequence[float]) -> list[float]:
    """Compute Pinsker's bound on the change of any event's probability: sqrt(KL / 2)."""
    return [math.sqrt(bound / 2) for bound in bounds]


def ratios(name: str) -> list[float]:
    old, new = (row(p).log() for p in DISTRIBUTIONS[name])
    return flat(log_ratio(new, old).exp())


# Physics: two states with energies 0, 1 under P and 0, 2 under Q, at temperature 1.


def free_energy() -> list[float]:
    """Compute the mean energy difference under P, the free-energy difference, and KL(P‖Q)."""
    first, second = row([0.0, 1.0]), row([0.0, 2.0])
    p, q = torch.softmax(-first, dim=1), torch.softmax(-second, dim=1)
    energy = float(weighted_sum(second - first, p))
    free = float(torch.logsumexp(-first, 1) - torch.logsumexp(-second, 1))
    return [energy, free, exact_kl(flat(p), flat(q))]


def kl_of_optimum(betas: Sequence[float]) -> list[float]:
    """Compute the KL to the reference of the optimum, reference x e^(r / beta), with r = 0 1 0."""
    reference = row(DISTRIBUTIONS["tokens_again"][0])
    reward = row([0.0, 1.0, 0.0])
    best = (torch.softmax(reference.log() + reward / beta, dim=1) for beta in betas)
    return [exact_kl(flat(policy), flat(reference)) for policy in best]


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
    """Compute GAE's advantages; with lambda 0 they are delta."""
    return flat(_advantages(lam))


def returns(lam: float) -> list[float]:
    return flat(_advantages(lam) + VALUES)


def surrogates() -> list[float]:
    """Compute L^CPI and L^CLIP of the illustrative advantages, where every ratio is 1."""
    losses = (
        _loss(CpiUpdate(kind="cpi"), OLD, OLD, ILLUSTRATIVE),
        _loss(ClipUpdate(), OLD, OLD, ILLUSTRATIVE),
    )
    return [-float(masked_mean(loss.per_token, MASK)) for loss in losses]


def illustrative_returns() -> list[float]:
    return flat(VALUES + ILLUSTRATIVE)


def needed_lambdas() -> list[float]:
    """Compute the lambda that each of the first five illustrative advantages would need."""
    deltas = row(advantages(0.0))
    return flat((ILLUSTRATIVE[:, :-1] - deltas[:, :-1]) / ILLUSTRATIVE[:, 1:])


def row_objective() -> list[float]:
    """Compute the score minus beta x the row's KL, as the sum of its rewards."""
    return [float(masked_sum(_rewards(), MASK))]


# The metrics of an update's first step on that row: new and old policy are the same.


def value_losses() -> list[float]:
    """Compute half the mean squared error, and the mean squared error."""
    loss = float(masked_mean(squared_value_loss(VALUES, VALUES + ILLUSTRATIVE).per_token, MASK))
    return [loss, 2 * loss]


def first_step_loss() -> list[float]:
    return [float(masked_mean(_first_step().per_token, MASK))]


def clip_fractions() -> list[float]:
    """Compute the clip fraction of the critic (clip 0.2), then of the actor."""
    value = clip_value_loss(VALUES, VALUES, VALUES + ILLUSTRATIVE, 0.2)
    policy = _first_step()
    clipped = value.clipped, policy.clipped
    return [float(masked_mean(cells.double(), MASK)) for cells in clipped]


def approximate_kl() -> list[float]:
    """Estimate KL(old‖new) from old samples as e^x - x - 1 of the log-ratio x."""
    return [float(masked_mean(k3(OLD, OLD, MASK), MASK))]


def mean_surprisal() -> list[float]:
    """Compute the mean of -log pi_old: the sampled tokens' estimate of the entropy."""
    return [float(masked_mean(-OLD, MASK))]


def most_entropy(vocabulary: int) -> list[float]:
    """Compute the largest mean entropy: all other tokens share the rest of each row evenly."""
    found = []
    for p in old_probabilities():
        rest = math.log(1 - p) - math.log(vocabulary - 1)
        found.append(-p * math.log(p) - (1 - p) * rest)
    return [math.fsum(found) / len(found)]


def equal_choices(entropy: float) -> list[float]:
    """Compute the perplexity: the number of equally likely tokens with this entropy."""
    return [math.exp(entropy)]


def _first_step() -> PolicyLoss:
    return _loss(ClipUpdate(), OLD, OLD, ILLUSTRATIVE)


def _loss(update: AnyUpdate, new: Tensor, old: Tensor, advantages: Tensor) -> PolicyLoss:
    return policy_loss(update, LossInputs(new, old, advantages, everywhere(old)))


def _rewards() -> Float[Tensor, "1 tokens"]:
    scores = place_scores(torch.ones(1, dtype=torch.float64), MASK)
    return shape_rewards(scores, k1(OLD, REF, MASK), BETA)


def _advantages(lam: float) -> Float[Tensor, "1 tokens"]:
    ended = torch.zeros(1, dtype=torch.float64)
    return gae(_rewards(), VALUES, ended, MASK, 1.0, lam)


# A dialogue of three turns: two tokens, an observation, one token, an observation, two tokens.
# gamma 1, lambda 0.5, beta 0.1.

TURNS = [True, True, False, True, False, False, True, True]
TURN_SCORES = row([0, 0.5, 0, -0.25, 0, 0, 0, 2])
TURN_KL = row([0.1, 0.2, 0, 0.1, 0, 0, 0, 0.5])
TURN_VALUES = row([1, 2, 0, 0.5, 0, 0, 1, 1.5])


def turn_rewards(by_turn: bool = True) -> list[float]:
    """Compute token_level_rewards, with the score of each turn or with their sum at the end."""
    return _written(_turn_rewards(by_turn))


def turn_advantages(lam: float, after: float = 0.0, by_turn: bool = True) -> list[float]:
    """Compute GAE's advantages of what the policy wrote; `after` is the value after the end."""
    mask, final = torch.tensor([TURNS]), torch.tensor([after], dtype=torch.float64)
    return _written(gae(_turn_rewards(by_turn), TURN_VALUES, final, mask, 1.0, lam))


def _turn_rewards(by_turn: bool) -> Float[Tensor, "1 tokens"]:
    placed = TURN_SCORES if by_turn else None
    scores = place_scores(TURN_SCORES.sum(dim=1), torch.tensor([TURNS]), placed)
    return shape_rewards(scores, TURN_KL, 0.1)


def _written(numbers: Float[Tensor, "1 tokens"]) -> list[float]:
    return numbers[torch.tensor([TURNS])].tolist()


# One token of old probability 0.3.


def unclipped(ratio: float, advantage: float) -> list[float]:
    """Compute the ratio, and ratio x advantage."""
    loss = _loss(CpiUpdate(kind="cpi"), _log(0.3 * ratio), _log(0.3), row([advantage]))
    return [float(loss.ratio), -float(loss.per_token)]


def clipped(ratio: float, advantage: float, bound: float | None = None) -> list[float]:
    """Compute the clipped objective, eps 0.2, and its gradient by log pi_new."""
    new = _log(0.3 * ratio).requires_grad_()
    loss = _loss(ClipUpdate(dual_clip=bound), new, _log(0.3), row([advantage]))
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), new)
    return [-float(loss.per_token.detach()), -float(gradient)]


def lower_of_two(ratio: float, advantage: float) -> list[float]:
    """Compute the loss, and the wrong one that is min(-A r, -A clip r)."""
    advantages = row([advantage])
    loss = _loss(ClipUpdate(), _log(0.3 * ratio), _log(0.3), advantages)
    held = -advantages * loss.ratio.clamp(0.8, 1.2)
    return [float(loss.per_token), float(torch.minimum(-advantages * loss.ratio, held))]


def ratio_of_row(ratio: float, tokens: int) -> list[float]:
    """Compute the ratio of a whole response whose tokens all have this ratio."""
    old = torch.full((1, tokens), math.log(0.3), dtype=torch.float64)
    each = log_ratio(old + math.log(ratio), old)
    return [float(masked_sum(each, everywhere(each)).exp())]


def penalised() -> list[float]:
    """Compute KL(old‖new) of 0.3 -> 0.6, and PPO-Penalty's loss for A = 1 with coefficient 1."""
    kl = exact_kl((0.3, 0.7), (0.6, 0.4))
    inputs = LossInputs(_log(0.6), _log(0.3), row([1.0]), everywhere(row([1.0])), row([kl]))
    loss = policy_loss(PenaltyUpdate(kind="penalty", coef=1.0), inputs)
    return [kl, float(loss.per_token)]


def kl_and_reward(old: float, ref: float, beta: float) -> list[float]:
    """Compute k1 and the reward 1 - beta x k1."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    kl = k1(_log(old), _log(ref), mask)
    score = place_scores(torch.ones(1, dtype=torch.float64), mask)
    return [float(kl), float(shape_rewards(score, kl, beta))]


def log_ratio_in_nats_and_bits(p: float, q: float) -> list[float]:
    nats, _ = kl_and_reward(p, q, beta=0.0)
    return [nats, nats / NATS_PER_BIT]


def _log(p: float) -> Float[Tensor, "1 1"]:
    return row([math.log(p)])


# Counting.


def sequence_lengths() -> list[float]:
    """Count the tokens of a prompt, a response and the whole row by their masks."""
    lengths = torch.tensor([8, 6])
    counted = length_mask(lengths, 14).sum(dim=1)
    return [*counted.double().tolist(), float(counted.sum())]


def optimizer_steps(rows: int, minibatch_rows: int, epochs: int) -> list[float]:
    """Count the steps of an update by iterating over its minibatches."""
    schedule = MinibatchSchedule("actor", 0, 0, epochs, minibatch_rows, 1, "token_mean", 1)
    return [float(sum(1 for _ in row_slices(rows, schedule)))]
