"""Advantage estimators: how much better than expected was each token?

`gae` asks a critic what was expected. The others need none: they compare a response with others
to the same prompt, with the batch, or with the greedy response. s is a row's summed token reward.
What each needs is data in `tether.config.estimators`, by the same names as `ESTIMATORS` here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.algo.masked import masked_moments, whiten
from tether.config import AdvantageSection
from tether.types import ALL_HERE, Rows

SPREAD_FLOOR = 1e-6  # added to a group's standard deviation before dividing by it


def place_scores(
    scores: Float[Tensor, " rows"],
    mask: Bool[Tensor, "rows response"],
    token_values: Float[Tensor, "rows response"] | None = None,
) -> Float[Tensor, "rows response"]:
    """Put each score on the last True cell of its row; a row without a True cell gets none.

    Where the reward said which tokens its scores belong to, `token_values` has them: a reward of a
    turn is on the turn's last sampled token. It keeps what is on True cells.
    """
    if token_values is not None:
        return torch.where(mask, token_values, 0.0)
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, -1).amax(dim=1)
    return torch.where(columns == last[:, None], scores[:, None], 0.0)


def shape_rewards(
    token_level_scores: Float[Tensor, "rows response"],
    kl: Float[Tensor, "rows response"],
    beta: float,
) -> Float[Tensor, "rows response"]:
    """Return score - beta x KL per token. `kl` is 0 on masked cells, and so is the result.

    Ziegler et al. 2019 (1909.08593), section 2.
    """
    return token_level_scores - beta * kl


def overlong_penalty(
    lengths: Int[Tensor, " rows"], max_tokens: int, buffer_tokens: int, dtype: torch.dtype
) -> Float[Tensor, " rows"]:
    """Return 0 up to `max_tokens - buffer_tokens`, then linearly to -1 at `max_tokens`.

    DAPO, Yu et al. 2025 (2503.14476), section 3.4, equation 13.
    """
    over = (lengths - (max_tokens - buffer_tokens)).clamp(min=0, max=buffer_tokens)
    return -over.to(dtype) / buffer_tokens


def bootstrap_values(
    values_after: Float[Tensor, " rows"], truncated: Bool[Tensor, " rows"], rule: str
) -> Float[Tensor, " rows"]:
    """Return the value after each response's last token: 0 once the response has ended.

    After a truncated one it is the critic's estimate by rule `bootstrap`, and 0 by the others.
    """
    if rule == "bootstrap":
        return torch.where(truncated, values_after, 0.0)
    return torch.zeros_like(values_after)


@dataclass(frozen=True)
class WeightedReward:
    """One of several rewards that a score is the weighted sum of."""

    weight: float
    values: Float[Tensor, " rows"]


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may use. Rows of one prompt are neighbours, `samples` of them."""

    rewards: Float[Tensor, "rows response"]  # score - beta x KL
    values: Float[Tensor, "rows response"]  # 0 without a critic
    final_values: Float[Tensor, " rows"]  # see `bootstrap_values`
    scores: Float[Tensor, " rows"]  # before the KL
    greedy_scores: Float[Tensor, " rows"]  # of the greedy response to the same prompt, or 0
    mask: Bool[Tensor, "rows response"]
    samples: int
    parts: Sequence[WeightedReward] = ()  # the named rewards, where the estimator needs them
    # beta x KL to the reference, which `rewards` have already; None where nothing asks for it
    kl_penalty: Float[Tensor, "rows response"] | None = None
    rows: Rows = ALL_HERE  # a group's rows may be with several processes


def estimate_advantages(
    section: AdvantageSection, inputs: AdvantageInputs
) -> Float[Tensor, "rows response"]:
    """Return raw advantages by the section's estimator; whitening is a step of its own."""
    return ESTIMATORS[section.estimator](section, inputs)


Estimate = Callable[[AdvantageSection, AdvantageInputs], Float[Tensor, "rows response"]]
ESTIMATORS: dict[str, Estimate] = {
    "gae": lambda s, x: gae_by(s, x, policy_lambda(s, x.mask, x.rewards.dtype)),
    "grpo": lambda s, x: grpo(x.rewards, x.scores, x.mask, x.samples, x.rows),
    "dr_grpo": lambda s, x: minus_group_mean(x.rewards, x.mask, x.samples, x.rows),
    "rloo": lambda s, x: rloo(x.rewards, x.mask, x.samples, x.rows),
    "reinforce_plus_plus": lambda s, x: reward_to_go(x.rewards, x.mask, s.gamma),
    "reinforce_plus_plus_baseline": lambda s, x: minus_group_mean(
        x.rewards, x.mask, x.samples, x.rows
    ),
    "remax": lambda s, x: remax(x.rewards, x.greedy_scores, x.mask, s.gamma),
    "opo": lambda s, x: opo(x.rewards, x.mask, x.samples, x.rows),
    "gdpo": lambda s, x: gdpo(x.parts, x.mask, x.samples, x.rows),
    "distillation": lambda s, x: distillation(x.kl_penalty, x.mask),
}


def critic_returns(
    section: AdvantageSection,
    inputs: AdvantageInputs,
    advantages: Float[Tensor, "rows response"],
    lam: float | None,
) -> Float[Tensor, "rows response"]:
    """Return what the critic learns: advantages + values, with advantages of its own lambda.

    None is the lambda of `advantages`. A low lambda lets the policy's advantages vary little, and
    a lambda of 1 lets the critic see a reward at the end undiminished in every state before it.

    VC-PPO, Yuan et al. 2025 (2503.01491), section 3.2; VAPO, Yue et al. 2025 (2504.05118).
    """
    own = advantages if lam is None else gae_by(section, inputs, lam)
    return own + inputs.values


def policy_lambda(
    section: AdvantageSection, mask: Bool[Tensor, "rows response"], dtype: torch.dtype
) -> float | Float[Tensor, " rows"]:
    """Return the lambda of the advantages: one number, or by `lam_alpha` one per row.

    1 - 1 / max(1, alpha x length): the terms of GAE reach over a fixed share of every response.
    Without the bound it would be negative below 1/alpha tokens.

    VAPO, Yue et al. 2025 (2504.05118), section 4.2.
    """
    if section.lam_alpha is None:
        return section.lam
    lengths = mask.sum(dim=1).to(dtype)
    return 1 - 1 / (section.lam_alpha * lengths).clamp(min=1)


def gae_by(
    section: AdvantageSection, inputs: AdvantageInputs, lam: float | Float[Tensor, " rows"]
) -> Float[Tensor, "rows response"]:
    """Estimate advantages by GAE with this lambda and the section's gamma."""
    x = inputs
    return gae(x.rewards, x.values, x.final_values, x.mask, section.gamma, lam)


def gae(
    rewards: Float[Tensor, "rows response"],
    values: Float[Tensor, "rows response"],
    final_values: Float[Tensor, " rows"],
    mask: Bool[Tensor, "rows response"],
    gamma: float,
    lam: float | Float[Tensor, " rows"],
) -> Float[Tensor, "rows response"]:
    """Estimate advantages by GAE, backwards over the columns; `lam` may differ from row to row.

        delta_t = r_t + gamma * V_next - V_t
        A_t     = delta_t + gamma * lam * A_next

    On a masked cell V_next and A_next pass unchanged: no decay, no reward, as if the column were
    not there. After the last sampled token V_next is `final_values`, 0 for a finished response.

    Schulman et al. 2016 (1506.02438).
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
    """Return the discounted sum of the rewards from each token on; masked columns do not discount.

    Whitened over the batch it is REINFORCE++: Hu et al. 2025 (2501.03262).
    """
    zeros = torch.zeros_like(rewards)
    return gae(rewards, zeros, zeros.sum(dim=1), mask, gamma, lam=1.0)


def remax(
    rewards: Float[Tensor, "rows response"],
    greedy_scores: Float[Tensor, " rows"],
    mask: Bool[Tensor, "rows response"],
    gamma: float,
) -> Float[Tensor, "rows response"]:
    """Return the reward-to-go minus the score of the greedy response to the same prompt.

    Li et al. 2023 (2310.10505).
    """
    return torch.where(mask, reward_to_go(rewards, mask, gamma) - greedy_scores[:, None], 0.0)


def grpo(
    rewards: Float[Tensor, "rows response"],
    scores: Float[Tensor, " rows"],
    mask: Bool[Tensor, "rows response"],
    samples: int,
    rows: Rows = ALL_HERE,
) -> Float[Tensor, "rows response"]:
    """Return (s - mean) / (std + 1e-6) within the group, std unbiased.

    A group whose raw scores are all equal gets 0: its rows differ only in the KL in the reward,
    which the division would scale up to size 1.

    Shao et al. 2024 (2402.03300), section 4.1.2.
    """
    groups = group_rows(rewards, mask, samples, rows)
    variance = (groups.centred**2).sum(dim=1, keepdim=True) / (groups.count - 1).clamp(min=1)
    advantages = groups.to_tokens(groups.centred / (variance.sqrt() + SPREAD_FLOOR))
    alike = rows.own(zero_spread(scores, mask, samples, rows).repeat_interleave(samples))
    return torch.where(alike[:, None], 0.0, advantages)


def minus_group_mean(
    rewards: Float[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
    samples: int,
    rows: Rows = ALL_HERE,
) -> Float[Tensor, "rows response"]:
    """Return s - mean of the group.

    With token losses summed and divided by a constant it is Dr. GRPO: Liu et al. 2025
    (2503.20783). Whitened over the batch it is REINFORCE++ with a baseline: Hu et al. 2025
    (2501.03262).
    """
    groups = group_rows(rewards, mask, samples, rows)
    return groups.to_tokens(groups.centred)


def rloo(
    rewards: Float[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
    samples: int,
    rows: Rows = ALL_HERE,
) -> Float[Tensor, "rows response"]:
    """Return s - mean of the other rows of the group = k/(k-1) (s - mean), unbiased.

    Kool et al. 2019, *Buy 4 REINFORCE Samples, Get a Baseline for Free!*; Ahmadian et al. 2024
    (2402.14740).
    """
    groups = group_rows(rewards, mask, samples, rows)
    return groups.to_tokens(groups.centred * groups.count / (groups.count - 1).clamp(min=1))


def opo(
    rewards: Float[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
    samples: int,
    rows: Rows = ALL_HERE,
) -> Float[Tensor, "rows response"]:
    """Return s - mean of the group weighted by length: the baseline of least variance.

    Hao et al. 2025 (2505.23585).
    """
    groups = group_rows(rewards, mask, samples, rows)
    lengths = rows.everyone(mask.sum(dim=1)).view(-1, samples)
    weighted = (lengths * groups.sums).sum(dim=1, keepdim=True)
    return groups.to_tokens(groups.sums - weighted / lengths.sum(dim=1, keepdim=True).clamp(min=1))


def gdpo(
    parts: Sequence[WeightedReward],
    mask: Bool[Tensor, "rows response"],
    samples: int,
    rows: Rows = ALL_HERE,
) -> Float[Tensor, "rows response"]:
    """Return the weighted sum of every reward's own (s - mean) / (std + 1e-6) within the group,
    standardised over the rows of the batch.

    In a sum of rewards the one with the largest spread decides the advantage; apart, each counts
    by its weight alone. A reward without spread in a group adds 0 there.

    GDPO, Liu et al. 2026 (2601.05242). The last step is over rows, as in TRL and NeMo RL.
    """
    on_first = torch.zeros_like(mask)
    on_first[:, :1] = True  # one cell per row holds the row's reward
    present = mask.any(dim=1)
    total = torch.zeros_like(parts[0].values)
    for part in parts:
        rewards = torch.where(on_first & present[:, None], part.values[:, None], 0.0)
        own = grpo(rewards, part.values, on_first & present[:, None], samples, rows)
        total = total + part.weight * own.sum(dim=1)
    standardised = whiten(total, present, masked_moments(total, present, rows))
    # A group without any spread has no advantage, and not what rounding leaves of the mean.
    groups = rows.everyone(total).view(-1, samples)
    silent = rows.own((groups == 0).all(dim=1).repeat_interleave(samples))
    return torch.where(mask & ~silent[:, None], standardised[:, None], 0.0)


def distillation(
    kl_penalty: Float[Tensor, "rows response"] | None, mask: Bool[Tensor, "rows response"]
) -> Float[Tensor, "rows response"]:
    """Return beta (log pi_teacher - log pi_old) of each sampled token, the teacher being the
    reference.

    A token is compared with what the teacher would have said in the same state, whatever follows:
    states are fixed on purpose, as with a discount of 0. The score teaches nothing.

    On-policy distillation: Agarwal et al. 2024 (2306.13649); Gu et al. 2024 (2306.08543).
    """
    assert kl_penalty is not None
    return torch.where(mask, 0.0 - kl_penalty, 0.0)


@dataclass(frozen=True)
class Groups:
    """All rows of a batch by prompt, each with its s. Rows without a True cell are not counted."""

    mask: Bool[Tensor, "rows response"]  # of the rows here
    rows: Rows
    present: Bool[Tensor, "groups samples"]
    sums: Float[Tensor, "groups samples"]  # s; 0 for a row without a True cell
    centred: Float[Tensor, "groups samples"]  # s - mean; 0 likewise
    count: Int[Tensor, "groups 1"]

    def to_tokens(
        self, advantages: Float[Tensor, "groups samples"]
    ) -> Float[Tensor, "rows response"]:
        """Give every token its row's advantage, exactly 0 where all s of a group are equal.

        Where only the raw scores are equal, the KL in the reward still tells the rows apart, and
        the true gradient is that of beta times the KL: a solved prompt pulls the policy back to
        the reference.
        """
        alike = _without_spread(self.sums, self.present)
        advantages = torch.where(alike[:, None], 0.0, advantages)  # and not what rounding leaves
        return torch.where(self.mask, self.rows.own(advantages.reshape(-1))[:, None], 0.0)


def group_rows(
    rewards: Float[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
    samples: int,
    rows: Rows = ALL_HERE,
) -> Groups:
    """Sum the rewards of each row, and compare it with its group: `samples` neighbouring rows.

    Rows are summed in float64: in float32 the last bit of a sum would depend on how far the batch
    is padded.
    """
    present = rows.everyone(mask.any(dim=1)).view(-1, samples)
    row_sums = rows.everyone(rewards.sum(dim=1, dtype=torch.float64).to(rewards.dtype))
    sums = torch.where(present, row_sums.view(-1, samples), 0.0)
    count = present.sum(dim=1, keepdim=True)
    mean = sums.sum(dim=1, keepdim=True) / count.clamp(min=1)
    return Groups(mask, rows, present, sums, torch.where(present, sums - mean, 0.0), count)


def zero_spread(
    numbers: Float[Tensor, " rows"],
    mask: Bool[Tensor, "rows response"],
    samples: int,
    rows: Rows = ALL_HERE,
) -> Bool[Tensor, " groups"]:
    """Return the groups whose rows with a True cell, at least one, all have the same number."""
    present = rows.everyone(mask.any(dim=1)).view(-1, samples)
    return _without_spread(rows.everyone(numbers).view(-1, samples), present)


def _without_spread(
    grouped: Float[Tensor, "groups samples"], present: Bool[Tensor, "groups samples"]
) -> Bool[Tensor, " groups"]:
    highest = torch.where(present, grouped, -torch.inf).amax(dim=1)
    lowest = torch.where(present, grouped, torch.inf).amin(dim=1)
    return highest == lowest
