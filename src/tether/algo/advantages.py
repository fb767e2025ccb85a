"""Advantage estimators: how much better than expected was each token?

`gae` asks a critic what was expected. The others need none: they compare a response with others
to the same prompt, with the batch, or with the greedy response. s is a row's summed token reward.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def place_scores(
    scores: Float[Tensor, " rows"], mask: Bool[Tensor, "rows response"]
) -> Float[Tensor, "rows response"]:
    """Each score on the last True cell of its row, once; a row without a True cell gets none."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, -1).amax(dim=1)
    return torch.where(columns == last[:, None], scores[:, None], 0.0)


def shape_rewards(
    token_level_scores: Float[Tensor, "rows response"],
    kl: Float[Tensor, "rows response"],
    beta: float,
) -> Float[Tensor, "rows response"]:
    """score - beta x KL, token by token. `kl` is 0 on masked cells, and so is the result."""
    return token_level_scores - beta * kl


SPREAD_FLOOR = 1e-6


def bootstrap_values(
    values_after: Float[Tensor, " rows"], truncated: Bool[Tensor, " rows"], rule: str
) -> Float[Tensor, " rows"]:
    """The value after each response's last token: 0 once it has ended. A truncated one is worth
    0 by rule `zero` too, and the critic's estimate by rule `bootstrap`."""
    if rule == "zero":
        return torch.zeros_like(values_after)
    return torch.where(truncated, values_after, 0.0)


def estimate_advantages(
    estimator: str,
    rewards: Float[Tensor, "rows response"],
    values: Float[Tensor, "rows response"],
    final_values: Float[Tensor, " rows"],
    scores: Float[Tensor, " rows"],
    greedy_scores: Float[Tensor, " rows"],
    mask: Bool[Tensor, "rows response"],
    gamma: float,
    lam: float,
    samples: int,
) -> Float[Tensor, "rows response"]:
    """Raw advantages by the estimator of that name; whitening is the caller's own line."""
    match estimator:
        case "gae":
            return gae(rewards, values, final_values, mask, gamma, lam)
        case "reinforce_plus_plus":
            return reward_to_go(rewards, mask, gamma)
        case "remax":
            return remax(rewards, greedy_scores, mask, gamma)
    return group_advantages(estimator, rewards, scores, mask, samples)


def gae(
    rewards: Float[Tensor, "rows response"],
    values: Float[Tensor, "rows response"],
    final_values: Float[Tensor, " rows"],
    mask: Bool[Tensor, "rows response"],
    gamma: float,
    lam: float,
) -> Float[Tensor, "rows response"]:
    """Generalised advantage estimation, backwards over the columns.

        delta_t = r_t + gamma * V_next - V_t
        A_t     = delta_t + gamma * lam * A_next

    On a masked cell V_next and A_next pass unchanged: no decay, no reward, as if the column were
    not there. After the last sampled token V_next is `final_values`, 0 for a finished response.
    """
    advantages = torch.zeros_like(rewards)
    next_value = final_values
    next_advantage = torch.zeros_like(final_values)
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(here, advantage, 0.0)
        next_value = torch.where(here, values[:, t], next_value)
        next_advantage = torch.where(here, advantage, next_advantage)
    return advantages


def reward_to_go(
    rewards: Float[Tensor, "rows response"], mask: Bool[Tensor, "rows response"], gamma: float
) -> Float[Tensor, "rows response"]:
    """Discounted sum of the rewards from each token on; masked columns do not discount."""
    zeros = torch.zeros_like(rewards)
    return gae(rewards, zeros, zeros[:, 0], mask, gamma, lam=1.0)


def remax(
    rewards: Float[Tensor, "rows response"],
    greedy_scores: Float[Tensor, " rows"],
    mask: Bool[Tensor, "rows response"],
    gamma: float,
) -> Float[Tensor, "rows response"]:
    """Reward-to-go minus what the greedy response to the same prompt scored."""
    return torch.where(mask, reward_to_go(rewards, mask, gamma) - greedy_scores[:, None], 0.0)


def group_advantages(
    estimator: str,
    rewards: Float[Tensor, "rows response"],
    scores: Float[Tensor, " rows"],
    mask: Bool[Tensor, "rows response"],
    samples: int,
) -> Float[Tensor, "rows response"]:
    """One advantage a row, the same on all its tokens: s against the group's baseline.

    A group is the `samples` neighbouring rows of one prompt; rows without a True cell are not in
    it. Where all raw scores of a group are equal, its rows still differ in the KL in the reward,
    and the true gradient is that of beta times the KL: a solved prompt pulls back to the reference.
    Only grpo gets 0 there, as its division by the spread would scale that KL up to size 1. Rows are
    summed in float64: in float32 the sum would depend, in its last bit, on how far the batch is
    padded.

        grpo                          (s - mean) / (std + 1e-6)
        dr_grpo                       s - mean
        reinforce_plus_plus_baseline  s - mean, to be whitened
        rloo                          s - mean of the others = k/(k-1) (s - mean)
        opo                           s - mean weighted by length
    """
    there = mask.any(dim=1).view(-1, samples)
    row_sums = rewards.sum(dim=1, dtype=torch.float64).to(rewards.dtype)
    total = torch.where(there, row_sums.view(-1, samples), 0.0)
    count = there.sum(dim=1, keepdim=True)
    mean = total.sum(dim=1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(there, total - mean, 0.0)
    alike = zero_spread(row_sums, mask, samples)  # exactly 0 there, and not what rounding leaves
    match estimator:
        case "grpo":
            variance = (centred**2).sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
            advantage = centred / (variance.sqrt() + SPREAD_FLOOR)
            alike = alike | zero_spread(scores, mask, samples)
        case "dr_grpo" | "reinforce_plus_plus_baseline":
            advantage = centred
        case "rloo":
            advantage = centred * count / (count - 1).clamp(min=1)
        case "opo":
            lengths = mask.sum(dim=1).view(-1, samples)
            weighted = (lengths * total).sum(dim=1, keepdim=True)
            advantage = total - weighted / lengths.sum(dim=1, keepdim=True).clamp(min=1)
        case _:
            raise ValueError(f"no group estimator {estimator!r}")
    advantage = torch.where(alike[:, None], 0.0, advantage)
    return torch.where(mask, advantage.reshape(-1, 1), 0.0)


def zero_spread(
    numbers: Float[Tensor, " rows"], mask: Bool[Tensor, "rows response"], samples: int
) -> Bool[Tensor, " groups"]:
    """Groups whose rows with a True cell, at least one, all have the same number."""
    there, grouped = mask.any(dim=1).view(-1, samples), numbers.view(-1, samples)
    highest = torch.where(there, grouped, -torch.inf).amax(dim=1)
    lowest = torch.where(there, grouped, torch.inf).amin(dim=1)
    return highest == lowest
