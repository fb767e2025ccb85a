"""A value head on the actor's own trunk: one forward, one loss, one optimizer for both."""

from tether.config import Config
from tether.train.controls import Controls
from tether.train.roles import Roles
from tether.train.updates.minibatches import Terms, walk_minibatches
from tether.train.updates.policy import (
    actor_walk,
    next_penalty_coef,
    policy_terms,
    snapshot_for_penalty,
)
from tether.train.updates.report import Report
from tether.train.updates.value import value_terms
from tether.types import Experience, Minibatch


def update_jointly(
    experience: Experience, roles: Roles, config: Config, iteration: int, controls: Controls
) -> Report:
    """The policy's terms plus critic.coef times the value loss, over the same states."""
    report = Report(new_log_probs=experience.old_log_probs.clone())
    old_policy = snapshot_for_penalty(roles, config)

    def compute(batch: Minibatch) -> Terms:
        states = roles.actor.states(batch.sequences)
        policy = policy_terms(batch, states, roles, config, controls, report, old_policy)
        value = value_terms(batch, roles.critic.read(states), config, report)
        loss = policy.loss + config.critic.coef * value.loss
        return Terms(loss, {**policy.parts, **value.parts}, policy.kl_from_old)

    walk_minibatches(
        experience, actor_walk(roles, config, iteration), roles.actor_optimizer, compute, report
    )
    report.penalty_coef = next_penalty_coef(experience, roles, config, controls)
    return report
