"""The critic's update in minibatches: squared error against the returns."""

from jaxtyping import Float
from torch import Tensor

from tether.algo.losses import clip_value_loss, squared_value_loss
from tether.algo.masked import weighted_sum
from tether.config import Config
from tether.ppo.roles import Roles
from tether.ppo.updates.minibatches import (
    MinibatchSchedule,
    OptimizerStep,
    UpdateReport,
    optimizer_steps,
)
from tether.run.metrics import Mean
from tether.types import Experience, Minibatch


def update_critic(
    experience: Experience, roles: Roles, config: Config, iteration: int
) -> UpdateReport:
    """Fit the critic to the returns, if it has weights of its own.

    On a shared trunk it learns in the actor's update instead.
    """
    report = UpdateReport()
    if roles.critic_optimizer is not None:
        fit_critic(experience, roles, config, critic_schedule(config, iteration), report)
    return report


def fit_critic(
    experience: Experience,
    roles: Roles,
    config: Config,
    schedule: MinibatchSchedule,
    report: UpdateReport,
) -> None:
    """Take the schedule's optimizer steps on the value loss."""
    optimizer = roles.critic_optimizer
    assert optimizer is not None
    for step in optimizer_steps(experience, schedule, optimizer, report):
        for batch in step.microbatches():
            new_values = roles.critic(batch.sequences)[:, :-1]
            value_loss(batch, new_values, config, step).backward()
        step.finish()


def critic_schedule(config: Config, iteration: int) -> MinibatchSchedule:
    """Return how this iteration's rows become the critic's optimizer steps."""
    return MinibatchSchedule(
        role="critic",
        seed=config.seed,
        iteration=iteration,
        epochs=config.critic_epochs,
        minibatch_rows=config.critic_minibatch_rows,
        microbatch_tokens=config.critic.microbatch_tokens,
        aggregation="token_mean",
        max_response_tokens=config.rollout.max_response_tokens,
        together=config.rows_together("critic"),
    )


def value_loss(
    batch: Minibatch,
    new_values: Float[Tensor, "rows response"],
    config: Config,
    step: OptimizerStep,
) -> Float[Tensor, ""]:
    """Return the microbatch's share of the value loss, and record it in the step."""
    mask, clip = batch.response_mask, config.critic.clip
    if clip is None:
        value = squared_value_loss(new_values, batch.returns)
    else:
        value = clip_value_loss(new_values, batch.values, batch.returns, clip)
    loss = weighted_sum(value.per_token, batch.weights)
    step.add_loss("critic/vf_loss", loss)
    clipped = (value.clipped & mask).sum()
    step.report.meter.record("critic/vf_clipfrac", Mean(clipped, mask.sum()))
    return loss
