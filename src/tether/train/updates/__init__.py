"""Updates: each takes an iteration's experience and moves one role's weights.

A new policy loss goes into `policy.policy_loss`; a new way to step becomes a file here and a case
below.
"""

from tether.config import Config
from tether.train.controls import Controls
from tether.train.roles import Roles
from tether.train.updates.joint import update_jointly
from tether.train.updates.policy import update_policy
from tether.train.updates.report import Report
from tether.train.updates.trpo import update_trpo
from tether.train.updates.value import update_values
from tether.types import Experience


def update_critic(experience: Experience, roles: Roles, config: Config, iteration: int) -> Report:
    """Move the critic's own weights, if it has any of its own."""
    if not config.has_critic or config.critic.shared_trunk:
        return Report()
    return update_values(experience, roles, config, iteration)


def update_actor(
    experience: Experience, roles: Roles, config: Config, iteration: int, controls: Controls
) -> Report:
    """Move the actor, by the kind of update that the config names."""
    if iteration < config.critic.warmup_iterations:
        return Report(new_log_probs=experience.old_log_probs, penalty_coef=controls.penalty_coef)
    if config.actor.update.kind == "trpo":
        return update_trpo(experience, roles, config)
    update = update_jointly if config.critic.shared_trunk else update_policy
    return update(experience, roles, config, iteration, controls)
