"""Trap 18: a one-token policy with KL in the reward must end at pi* ~ pi_ref exp(r / beta).

Four bandits (two reward vectors, two betas) are trained side by side as four prompts with one
token each, with tether's own rewards, advantages, clip loss and random numbers.
"""

import numpy as np
import pytest
import torch

from tether.algo.advantages import gae
from tether.algo.aggregation import token_count, token_mean
from tether.algo.kl import k1, k3
from tether.algo.losses import clip_policy_loss, clip_value_loss
from tether.algo.random import permutation, uniform
from tether.algo.rewards import place_scores, shape_rewards
from tether.rollout.choose import inverse_cdf

REFERENCE = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1]).double()
REWARDS = torch.tensor([[1, 0.5, 0, -0.5, -1], [-0.6, 0.9, 0.1, 0.4, -0.2]]).double()
BETAS = torch.tensor([0.3, 0.6]).double()
# bandit = 2 * reward vector + beta
ARMS, BETA = REWARDS.repeat_interleave(2, dim=0), BETAS.repeat(2)

SAMPLES, ITERATIONS, EPOCHS, MINIBATCHES = 256, 400, 4, 4


def optimum() -> torch.Tensor:
    return torch.softmax(REFERENCE.log() + ARMS / BETA[:, None], dim=-1)


def where_k3_in_the_reward_leads() -> torch.Tensor:
    """Ascent along the exact gradient of E[r - beta k3] with k3 held constant, as a reward is.

    k3 punishes an arm the more, the rarer it has become, so rare arms are driven out for good.
    """
    logits = REFERENCE.log().repeat(4, 1)
    for _ in range(5_000):
        probs = torch.softmax(logits, dim=-1)
        q = (probs.log() - REFERENCE.log()).clamp(-20, 20)
        payoff = ARMS - BETA[:, None] * (torch.exp(-q) - 1 + q)
        advantage = payoff - (probs * payoff).sum(dim=-1, keepdim=True)
        logits = logits + (0.1 * probs * advantage).clamp(-0.1, 0.1)
    return torch.softmax(logits, dim=-1)


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return 0.5 * (p - q).abs().sum(dim=-1)


def train_bandits(estimator) -> torch.Tensor:
    """PPO-Clip with a critic of one number a bandit; the policies it ends at."""
    logits = REFERENCE.log().repeat(4, 1).requires_grad_()
    critic = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    bandits = torch.arange(4).repeat_interleave(SAMPLES)
    rows = np.arange(4 * SAMPLES)
    mask = torch.ones(4 * SAMPLES, 1, dtype=torch.bool)
    adam = torch.optim.Adam([logits, critic], lr=0.02)

    for iteration in range(ITERATIONS):
        adam.param_groups[0]["lr"] = 0.02 * (1 - iteration / ITERATIONS)
        with torch.no_grad():
            log_probs = torch.log_softmax(logits, dim=-1)[bandits]
            arms = inverse_cdf(log_probs, uniform(0, "bandit", iteration, rows))[:, None]
            old, ref = log_probs.gather(1, arms), REFERENCE.log()[arms]
            scores = place_scores(ARMS[bandits].gather(1, arms).squeeze(1), mask)
            # beta differs from bandit to bandit, so it is folded into the penalty here
            rewards = shape_rewards(scores, BETA[bandits, None] * estimator(old, ref, mask), 1.0)
            values = critic[bandits, None].clone()
            advantages = gae(rewards, values, torch.zeros(len(rows)).double(), mask, 1.0, 1.0)
            returns = advantages + values
        for epoch in range(EPOCHS):
            order = permutation(len(rows), 0, "bandit-order", iteration, epoch)
            for part in order.chunk(MINIBATCHES):
                new = torch.log_softmax(logits, dim=-1)[bandits[part]].gather(1, arms[part])
                policy = clip_policy_loss(new, old[part], advantages[part], 0.2, 0.2)
                value = clip_value_loss(
                    critic[bandits[part], None], values[part], returns[part], 0.2
                )
                count = token_count(mask[part])
                adam.zero_grad()
                loss = policy.per_token + value.per_token
                token_mean(loss, mask[part], count).backward()
                adam.step()
    return torch.softmax(logits.detach(), dim=-1)


def test_the_wrong_estimator_leads_far_enough_away_to_tell():
    assert (total_variation(where_k3_in_the_reward_leads(), optimum()) > 0.06).all()


@pytest.mark.parametrize(
    ("estimator", "right"), [(k1, True), (k3, False)], ids=["k1 is right", "k3 is wrong"]
)
def test_kl_in_the_reward_ends_where_theory_says(estimator, right):
    distance = total_variation(train_bandits(estimator), optimum())
    assert (distance < 0.02).all() if right else (distance > 0.05).all(), distance
