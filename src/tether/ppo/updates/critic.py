"""The critic's update in minibatches: squared error against the returns."""

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.losses import clip_value_loss, squared_value_loss
from tether.algo.masked import weighted_sum
from tether.config import Config
from tether.ppo.roles import Roles
from tether.ppo.updates.minibatches import LossTerms, MinibatchSchedule, Report, walk_minibatches
from tether.run.metrics import Mean
from tether.types import Experience, Minibatch


def update_values(experience: Experience, roles: Roles, config: Config, iteration: int) -> Report:
    report = Report()
    walk = MinibatchSchedule(
        role="critic",
        seed=config.seed,
        iteration=iteration,
        epochs=config.critic_epochs,
        minibatch_rows=config.critic_minibatch_rows,
        microbatch_tokens=config.critic.microbatch_tokens,
        aggregation="token_mean",
        max_response_tokens=config.rollout.max_response_tokens,
    )

    def compute(batch: Minibatch) -> LossTerms:
        return value_terms(batch, roles.critic(batch.sequences)[:, :-1], config, report)

    walk_minibatches(experience, walk, roles.critic_optimizer, compute, report)
    return report


def value_terms(
    batch: Minibatch,
    new_values: Float[Tensor, "rows response"],
    config: Config,
    report: Report,
) -> LossTerms:
    mask, clip = batch.response_mask, config.critic.clip
    if clip is None:
        value = squared_value_loss(new_values, batch.returns)
    else:
        value = clip_value_loss(new_values, batch.values, batch.returns, clip)
    loss = weighted_sum(value.per_token, batch.weights)
    with torch.no_grad():
        report.meter.record("critic/vf_clipfrac", Mean((value.clipped & mask).sum(), mask.sum()))
    return LossTerms(loss, {"critic/vf_loss": loss})
