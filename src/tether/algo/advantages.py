"""Advantage estimators: from token rewards (and values) to advantages."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def what_follows(
    values_after: Float[Tensor, " rows"], truncated: Bool[Tensor, " rows"], rule: str
) -> Float[Tensor, " rows"]:
    """The value after each response's last token: 0 once it has ended. A truncated one is worth
    0 by rule `zero` too, and the critic's estimate by rule `bootstrap`."""
    if rule == "zero":
        return torch.zeros_like(values_after)
    return torch.where(truncated, values_after, 0.0)


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
