"""The least KL for a score, on bandits whose optimum is known in closed form."""

import math

import pytest
import torch
from helpers import table
from hypothesis import given
from hypothesis import strategies as st

from tether.algo.least_kl import least_kl, log_moments, tilts

REF = (0.1, 0.2, 0.4, 0.2, 0.1)
REWARDS = ((1.0, 0.5, 0.0, -0.5, -1.0), (-0.6, 0.9, 0.1, 0.4, -0.2))


def least(score: float, scores: tuple[float, ...], *shares: tuple[float, ...]) -> float:
    """The bound for prompts with these shares of the scores, their moments written out."""
    etas = tilts(torch.tensor([scores]))
    moments = torch.zeros_like(etas)
    for prompt in shares:
        moments += sum(
            p * (eta_r).exp() for p, eta_r in zip(prompt, [r * etas for r in scores], strict=True)
        ).log()
    found = least_kl(torch.tensor([score]).double(), moments[None] / len(shares), etas)
    return float(found)


def kl(p, q) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


@table(("rewards", "beta"), [(r, beta) for r in REWARDS for beta in (0.3, 0.6, 2.0)])
def test_the_optimum_of_a_bandit_spends_the_least(rewards, beta):
    """pi* ~ ref exp(r / beta): its own KL is the least for its score."""
    weights = [p * math.exp(r / beta) for p, r in zip(REF, rewards, strict=True)]
    best = [w / math.fsum(weights) for w in weights]
    score = math.fsum(p * r for p, r in zip(best, rewards, strict=True))
    assert least(score, rewards, REF) == pytest.approx(kl(best, REF), rel=1e-3)


def test_two_prompts_of_right_and_wrong_by_hand():
    """Pass rates 1/4 and 1/2, tilted by e^eta = 3: 1/2 and 3/4. KL ln(4/3)/2 and 3/4 ln(3/2) +
    1/4 ln(1/2); the score is 5/8."""
    by_hand = (
        0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
        + 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    ) / 2  # fmt: skip
    assert least(0.625, (1.0, 0.0), (0.25, 0.75), (0.5, 0.5)) == pytest.approx(by_hand, rel=1e-3)


@given(st.lists(st.floats(0.01, 1), min_size=5, max_size=5), st.sampled_from(REWARDS))
def test_no_policy_is_below_the_bound(weights, rewards):
    policy = [w / math.fsum(weights) for w in weights]
    score = math.fsum(p * r for p, r in zip(policy, rewards, strict=True))
    assert least(score, rewards, REF) <= kl(policy, REF) + 1e-6


@table("n", [2, 4, 16])
def test_best_of_n_is_a_policy_and_not_the_bound(n):
    """Right with 1 - 0.8^n; its KL is between the least and ln n - (n - 1)/n."""
    right = 1 - 0.8**n
    spent = kl((right, 1 - right), (0.2, 0.8))
    found = least(right, (1.0, 0.0), (0.2, 0.8))
    assert found == pytest.approx(spent, rel=1e-3)  # of two outcomes there is one such policy
    assert spent <= math.log(n) - (n - 1) / n + 1e-9
    policy = (1 - 0.8**n, 0.8**n - 0.5**n, 0.5**n)
    score = policy[0] + 0.5 * policy[1]
    assert least(score, (1.0, 0.5, 0.0), (0.2, 0.3, 0.5)) < kl(policy, (0.2, 0.3, 0.5))


def test_a_score_of_the_reference_or_below_costs_nothing():
    assert least(0.5, (1.0, 0.0), (0.5, 0.5)) == pytest.approx(0, abs=1e-6)
    assert least(0.2, (1.0, 0.0), (0.5, 0.5)) == 0.0


def test_a_score_that_no_sample_has_costs_without_bound():
    """One prompt of two never has a right sample, so more than 1/2 is out of reach."""
    prompts = (0.5, 0.5), (0.0, 1.0)
    assert least(0.51, (1.0, 0.0), *prompts) == math.inf
    assert least(0.4, (1.0, 0.0), *prompts) < 1


def test_the_moments_of_samples_by_hand():
    """Scores 1, 1, 0, 0 at eta ln 3: mean 2, variance 4/3, so ln 2 + (4/3) / (2 x 4 x 4)."""
    scores, eta = torch.tensor([[1.0, 1.0, 0.0, 0.0]]), torch.tensor([math.log(3)])
    found = log_moments(scores, torch.ones_like(scores, dtype=torch.bool), eta.double())
    assert float(found) == pytest.approx(math.log(2) + 4 / 3 / 32)


def test_rows_that_are_not_known_do_not_count():
    scores = torch.tensor([[1.0, 0.0, 5.0], [1.0, 0.0, -5.0]])
    known = torch.tensor([[True, True, False], [True, True, False]])
    etas = torch.tensor([0.0, 0.5])
    alone = log_moments(scores[:, :2], known[:, :2], etas)
    torch.testing.assert_close(log_moments(scores, known, etas), alone)


def test_the_logarithm_of_a_mean_is_corrected_for_its_bias():
    """Of 64 samples that pass with 0.2, tilted by e²: over all counts the mean of ln mean is
    0.0098 too small, the corrected one within a quarter of that."""
    p, n, eta = 0.2, 64, 2.0
    right = math.log(p * math.exp(eta) + 1 - p)
    plain = corrected = 0.0
    for c in range(n + 1):
        chance = math.comb(n, c) * p**c * (1 - p) ** (n - c)
        row = torch.tensor([[1.0] * c + [0.0] * (n - c)])
        found = log_moments(row, torch.ones_like(row, dtype=torch.bool), torch.tensor([eta]))
        corrected += chance * float(found)
        plain += chance * math.log((c * math.exp(eta) + n - c) / n)
    assert right - plain == pytest.approx(0.0098, abs=3e-4)
    assert abs(right - corrected) < 0.25 * (right - plain)
