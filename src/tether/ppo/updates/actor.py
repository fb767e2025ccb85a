"""The actor's update in minibatches: a policy loss, an entropy bonus, a KL to the reference."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.kl import adaptive_penalty, estimate_kl, k3, sequence_k2
from tether.algo.losses import LossInputs, PolicyLoss, log_ratio, policy_loss
from tether.algo.masked import masked_mean, masked_sum, weighted_sum
from tether.config import Config, PenaltyUpdate, TrpoUpdate
from tether.config.algorithm import AnyUpdate
from tether.models.policy import Policy
from tether.ppo.result import Controls
from tether.ppo.roles import Roles
from tether.ppo.updates.critic import value_loss
from tether.ppo.updates.minibatches import (
    MinibatchSchedule,
    OptimizerStep,
    UpdateReport,
    optimizer_steps,
)
from tether.ppo.updates.trpo import update_trpo
from tether.run.metrics import Max, Mean, Min
from tether.types import Experience, Minibatch


@dataclass(frozen=True)
class ActorObjective:
    """What the actor's loss is made of, beside the minibatch: constant during an update."""

    update: AnyUpdate  # with this iteration's coefficients
    config: Config
    roles: Roles
    old_policy: Policy | None  # the actor before the update, where the loss needs all of it


def update_actor(
    experience: Experience, roles: Roles, config: Config, iteration: int, controls: Controls
) -> UpdateReport:
    """Improve the actor on these rows by the kind of update that the config names.

    With a shared trunk the loss also has the value loss, times `critic.coef`, on the same states.
    """
    if iteration < config.critic.warmup_iterations:
        return UpdateReport(
            new_log_probs=experience.old_log_probs, penalty_coef=controls.penalty_coef
        )
    if isinstance(config.actor.update, TrpoUpdate):
        return update_trpo(experience, roles, config)

    report = UpdateReport(new_log_probs=experience.old_log_probs.clone())
    objective = actor_objective(roles, config, controls)
    schedule = actor_schedule(roles, config, iteration)
    for step in optimizer_steps(experience, schedule, roles.actor_optimizer, report):
        for batch in step.microbatches():
            states = roles.actor.states(batch.sequences)
            loss = actor_loss(batch, states, objective, step)
            if config.critic.shared_trunk:
                new_values = roles.critic.values_from_states(states)
                loss = loss + config.critic.coef * value_loss(batch, new_values, config, step)
            loss.backward()
        step.finish()
    report.penalty_coef = next_penalty_coef(experience, roles, config, controls)
    return report


def actor_objective(roles: Roles, config: Config, controls: Controls) -> ActorObjective:
    """Fix the objective of this iteration; it copies the actor where the loss needs the old one."""
    update = controls.applied_to(config.actor.update)
    old_policy = roles.actor.snapshot() if update.needs_old_policy else None
    return ActorObjective(update, config, roles, old_policy)


def actor_schedule(roles: Roles, config: Config, iteration: int) -> MinibatchSchedule:
    """Return how this iteration's rows become the actor's optimizer steps."""
    actor = config.actor
    return MinibatchSchedule(
        role="actor",
        seed=config.seed,
        iteration=iteration,
        epochs=actor.epochs,
        minibatch_rows=actor.minibatch_rows,
        microbatch_tokens=actor.microbatch_tokens,
        aggregation=config.aggregation,
        max_response_tokens=config.rollout.max_response_tokens,
        stop_kl=actor.stop_kl,
        max_cells=roles.actor.max_cached_cells,
        together=config.rows_together("actor"),
    )


def actor_loss(
    batch: Minibatch,
    states: Float[Tensor, "rows response width"],
    objective: ActorObjective,
    step: OptimizerStep,
) -> Float[Tensor, ""]:
    """Return the microbatch's share of the loss, and record its terms and metrics in the step:

    policy loss - entropy_coef x entropy + in_loss.coef x KL to the reference
    """
    actor, config = objective.roles.actor, objective.config
    weights = batch.weights
    new_log_probs, entropies = actor.log_probs_and_entropies(
        states, batch.sequences, batch.host_mask
    )
    # The ratio's bounds would make an infinity look like a number; the loss must show it.
    new_log_probs = torch.where(new_log_probs.isfinite(), new_log_probs, torch.nan)
    policy = policy_loss(
        objective.update, loss_inputs(new_log_probs, states, batch, actor, objective.old_policy)
    )
    loss = weighted_sum(policy.per_token * batch.correction_weights, weights)
    step.add_loss("actor/pg_loss", loss)
    if config.actor.entropy_coef > 0:
        entropy_loss = -weighted_sum(entropies, weights)
        step.add_loss("actor/entropy_loss", entropy_loss)
        loss = loss + config.actor.entropy_coef * entropy_loss
    if config.kl.in_loss.coef > 0:
        kl_loss = weighted_sum(kl_to_reference(new_log_probs, states, batch, objective), weights)
        step.add_loss("actor/kl_loss", kl_loss)
        loss = loss + config.kl.in_loss.coef * kl_loss
    record_actor(step, batch, policy, new_log_probs.detach(), entropies.detach())
    return loss


def loss_inputs(
    new_log_probs: Float[Tensor, "rows response"],
    states: Float[Tensor, "rows response width"],
    batch: Minibatch,
    actor: Policy,
    old_policy: Policy | None,
) -> LossInputs:
    """Gather what the policy loss reads; with `old_policy` the KL from it is exact."""
    return LossInputs(
        new_log_probs=new_log_probs,
        old_log_probs=batch.old_log_probs,
        advantages=batch.policy_advantages,
        mask=batch.response_mask,
        kl_from_old=None if old_policy is None else exact_kl(old_policy, actor, states, batch),
    )


def exact_kl(
    old_policy: Policy,
    actor: Policy,
    states: Float[Tensor, "rows response width"],
    batch: Minibatch,
) -> Float[Tensor, "rows response"]:
    """Return KL(pi_old || pi_new) per token, summed over the vocabulary."""
    with torch.no_grad():
        old_states = old_policy.states(batch.sequences)
    return actor.full_kl(old_policy.head, old_states, actor.head, states, batch.host_mask)


def kl_to_reference(
    new_log_probs: Float[Tensor, "rows response"],
    states: Float[Tensor, "rows response width"],
    batch: Minibatch,
    objective: ActorObjective,
) -> Float[Tensor, "rows response"]:
    """Return the KL term per token, by the estimator, level and weighting of `kl.in_loss`."""
    settings, reference = objective.config.kl.in_loss, objective.roles.reference
    mask = batch.response_mask
    if settings.estimator == "full":
        return reference.full_kl(objective.roles.actor, states, batch.sequences, batch.host_mask)
    if settings.level == "sequence":
        return sequence_k2(new_log_probs, batch.old_log_probs, batch.ref_log_probs, mask)
    kl = estimate_kl(settings.estimator, new_log_probs, batch.ref_log_probs, mask)
    if settings.by_ratio:
        return kl * log_ratio(new_log_probs, batch.old_log_probs).exp()
    return kl


def record_actor(
    step: OptimizerStep,
    batch: Minibatch,
    policy: PolicyLoss,
    new_log_probs: Float[Tensor, "rows response"],
    entropies: Float[Tensor, "rows response"],
) -> None:
    """Add a microbatch to the actor's metrics and to the KL by which `stop_kl` decides."""
    mask, tokens = batch.response_mask, batch.response_mask.sum()
    step.new_log_probs.keep(new_log_probs)
    kl = Mean(k3(batch.old_log_probs, new_log_probs, mask).sum(), tokens)
    step.kl_from_old = step.kl_from_old.merge(kl)
    high = policy.clipped_high | policy.clipped_dual
    record = step.report.meter.record
    record("actor/entropy", Mean(masked_sum(entropies, mask), tokens))
    record("actor/approx_kl", kl)
    record("actor/pg_clipfrac", Mean((policy.clipped & mask).sum(), tokens))
    record("actor/pg_clipfrac_high", Mean((high & mask).sum(), tokens))
    record("actor/pg_clipfrac_low", Mean((policy.clipped_low & mask).sum(), tokens))
    record("actor/ratio_max", Max(torch.where(mask, policy.ratio, 1.0).max()))
    record("actor/ratio_min", Min(torch.where(mask, policy.ratio, 1.0).min()))


def next_penalty_coef(
    experience: Experience, roles: Roles, config: Config, controls: Controls
) -> float:
    """Return PPO-Penalty's coefficient for the next iteration, from the KL after the last step."""
    update = config.actor.update
    if not isinstance(update, PenaltyUpdate) or update.controller == "fixed":
        return controls.penalty_coef
    mask, rows = experience.response_mask, experience.rows
    final = roles.actor.log_probs(experience.sequences, mask)
    kl = masked_mean(k3(experience.old_log_probs, final, mask), mask, rows)
    return adaptive_penalty(controls.penalty_coef, float(kl), update.target)
