"""Value pretraining: fit the critic to the starting policy before that policy moves.

A critic whose head starts at zero tells the first updates nothing, and worse than nothing once it
is half learnt: its errors are the advantages. So it learns first, alone, from one bank of
responses of the starting policy, with lambda 1, where its own errors are not in its targets.

VC-PPO, Yuan et al. 2025, arXiv 2503.01491, section 3.1; VAPO, Yue et al. 2025, arXiv 2504.05118.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tether.algo.masked import explained_variance
from tether.config import Config, PretrainSection
from tether.errors import UserError
from tether.ppo.iteration import make_experience
from tether.ppo.result import refuse_failing_tools
from tether.ppo.roles import Roles
from tether.ppo.scoring import score_greedy, score_rollout, shape_overlong
from tether.ppo.updates.critic import critic_schedule, fit_critic
from tether.ppo.updates.minibatches import UpdateReport
from tether.rollout.own_rows import sample_own
from tether.rollout.sampler import Draw
from tether.run.metrics import Event
from tether.types import Experience


@dataclass(frozen=True)
class Pretrained:
    """How far value pretraining came: explained variance of held-back returns after each epoch."""

    explained_variances: list[float]
    rows: int  # that were trained on

    def metrics(self) -> dict[str, float]:
        """Return the numbers that the first iteration's line has."""
        return {
            "critic/pretrain_explained_variance": self.explained_variances[-1],
            "critic/pretrain_epochs": float(len(self.explained_variances)),
        }

    def event(self) -> Event:
        """Return what is said of it in the run's events."""
        found, epochs = self.explained_variances[-1], len(self.explained_variances)
        return Event(
            "pretrained",
            f"the critic explains {found:.2f} of the variance of held-back returns after "
            f"{epochs} epochs on {self.rows} rows of the starting policy",
        )

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Pretrained":
        """Return what a checkpoint holds."""
        return cls(list(state["explained_variances"]), int(state["rows"]))


def pretrain_critic(
    settings: PretrainSection, beta: float, roles: Roles, config: Config
) -> Pretrained:
    """Fit the critic to the returns of a bank of responses, until it explains enough of those that
    it has not seen.

    If it is interrupted, the critic is as it was before.
    """
    optimizer = roles.critic_optimizer
    assert optimizer is not None  # a config rule: no shared trunk
    before = {name: weight.detach().clone() for name, weight in roles.critic.state().items()}
    optimizer.set_factor(1.0)
    try:
        return _fit(settings, _bank(settings, beta, roles, config), roles, config)
    except BaseException:
        roles.critic.load_state(before)
        optimizer.reset()
        raise


@dataclass(frozen=True)
class Bank:
    """Rows of the starting policy with their returns."""

    learnt: Experience
    heldback: Experience


def _bank(settings: PretrainSection, beta: float, roles: Roles, config: Config) -> Bank:
    """Sample, score and split the rows; no prompt is on both sides."""
    count, samples = (
        min(settings.prompts, len(roles.train_prompts)),
        config.rollout.samples_per_prompt,
    )
    prompts = roles.train_prompts.for_iteration(0, count, config.seed, config.data.shuffle)
    prompts = prompts.repeat(samples)
    roles.sampler.sync(roles.actor.model, 0)
    choice = Draw(config.seed, "pretrain", 0)
    prompts, rollout = sample_own(roles.sampler, roles.episodes, prompts, choice)
    refuse_failing_tools(rollout, config)
    scores, _ = score_rollout(prompts, rollout, roles, config)
    scores = shape_overlong(scores, rollout, config)
    greedy_scores = score_greedy(prompts, rollout.rows, roles, config)
    returns_only = config.critic.model_copy(update={"lam": 1.0})
    targets = config.model_copy(update={"critic": returns_only})
    experience = make_experience(rollout, scores, greedy_scores, beta, roles, targets).experience
    if config.advantage.truncation == "bootstrap":
        # What would follow a truncated row is the critic's own value, so it teaches nothing here.
        ended = ~rollout.truncated[:, None]
        experience = replace(experience, response_mask=experience.response_mask & ended)
    every = rollout.rows.gather(prompts.ids)
    heldback = _heldback_rows(every, round(settings.heldback * count) * samples)
    if not heldback.any():
        raise UserError(
            "critic.pretrain needs two different prompts in data.train, one to learn from and one "
            "to be measured on; add prompts, or leave critic.pretrain out."
        )
    rows, heldback = torch.arange(len(prompts)), rollout.rows.own(heldback)
    return Bank(experience.select(rows[~heldback]), experience.select(rows[heldback]))


def _heldback_rows(prompts: Sequence[list[int]], wanted: int) -> Bool[Tensor, " rows"]:
    """Mark the last `wanted` rows, and every other row with one of their prompts; at least the
    last prompt's, and never the first prompt's."""
    ids = [tuple(row) for row in prompts]
    last = set(ids[-max(wanted, 1) :]) - {ids[0]}
    return torch.tensor([row in last for row in ids])


def _fit(settings: PretrainSection, bank: Bank, roles: Roles, config: Config) -> Pretrained:
    unclipped = config.model_copy(
        update={"critic": config.critic.model_copy(update={"clip": None})}
    )
    found: list[float] = []
    for epoch in range(settings.max_epochs):
        schedule = replace(critic_schedule(config, epoch), role="pretrain", epochs=1)
        fit_critic(bank.learnt, roles, unclipped, schedule, UpdateReport())
        held = bank.heldback
        values, _ = roles.critic.values(held.sequences, held.response_mask)
        explained = explained_variance(values, held.returns, held.response_mask, held.rows)
        found.append(float(explained))
        if settings.explained_variance is not None and found[-1] >= settings.explained_variance:
            break
    return Pretrained(found, bank.learnt.rows.count(bank.learnt))
