"""The policy update in minibatches: a policy loss, an entropy bonus, a KL to the reference."""

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.kl import adaptive_penalty, estimate_kl, k3
from tether.algo.losses import LossInputs, log_ratio, policy_loss
from tether.algo.masked import masked_mean, masked_sum, weighted_sum
from tether.config import Config, PenaltyUpdate
from tether.models.policy import Policy
from tether.ppo.result import Controls
from tether.ppo.roles import Roles
from tether.ppo.updates.critic import update_values, value_terms
from tether.ppo.updates.minibatches import LossTerms, MinibatchSchedule, Report, walk_minibatches
from tether.ppo.updates.trpo import update_trpo
from tether.run.metrics import Max, Mean, Min
from tether.types import Experience, Minibatch


def update_policy(
    experience: Experience, roles: Roles, config: Config, iteration: int, controls: Controls
) -> Report:
    """One walk over the rows with the policy loss that `actor.update` names."""
    report = Report(new_log_probs=experience.old_log_probs.clone())
    old_policy = snapshot_old_policy(roles, config)

    def compute(batch: Minibatch) -> LossTerms:
        states = roles.actor.states(batch.sequences)
        return policy_terms(batch, states, roles, config, controls, report, old_policy)

    walk_minibatches(
        experience, actor_walk(roles, config, iteration), roles.actor_optimizer, compute, report
    )
    report.penalty_coef = next_penalty_coef(experience, roles, config, controls)
    return report


def actor_walk(roles: Roles, config: Config, iteration: int) -> MinibatchSchedule:
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
        microbatch_cells=roles.actor.max_cached_cells,
    )


def policy_terms(
    batch: Minibatch,
    states: Float[Tensor, "rows response width"],
    roles: Roles,
    config: Config,
    controls: Controls,
    report: Report,
    old_policy: Policy | None,
) -> LossTerms:
    """policy loss - entropy_coef x entropy + in_loss.coef x KL, and what there is to know of it."""
    mask, weights = batch.response_mask, batch.weights
    new_log_probs, entropies = roles.actor.log_probs_and_entropies(states, batch.sequences, mask)
    # The ratio's bounds would make an infinity look like a number; the loss must show it.
    new_log_probs = torch.where(new_log_probs.isfinite(), new_log_probs, torch.nan)
    policy = policy_loss(
        controls.applied_to(config.actor.update),
        loss_inputs(new_log_probs, states, batch, roles.actor, old_policy),
    )
    corrected = policy.per_token * batch.correction_weights
    parts = {"actor/pg_loss": weighted_sum(corrected, weights)}
    loss = parts["actor/pg_loss"]
    if config.actor.entropy_coef > 0:
        parts["actor/entropy_loss"] = -weighted_sum(entropies, weights)
        loss = loss + config.actor.entropy_coef * parts["actor/entropy_loss"]
    if config.kl.in_loss.coef > 0:
        kl = kl_to_reference(new_log_probs, states, batch, roles, config)
        parts["actor/kl_loss"] = weighted_sum(kl, weights)
        loss = loss + config.kl.in_loss.coef * parts["actor/kl_loss"]

    with torch.no_grad():
        moved = k3(batch.old_log_probs, new_log_probs, mask)
        kept = report.new_log_probs[batch.rows, : mask.shape[1]]
        report.new_log_probs[batch.rows, : mask.shape[1]] = torch.where(mask, new_log_probs, kept)
        record, tokens = report.meter.record, mask.sum()
        record("actor/entropy", Mean(masked_sum(entropies, mask), tokens))
        record("actor/approx_kl", Mean(moved.sum(), tokens))
        high = policy.clipped_high | policy.clipped_dual
        record("actor/pg_clipfrac", Mean((policy.clipped & mask).sum(), tokens))
        record("actor/pg_clipfrac_high", Mean((high & mask).sum(), tokens))
        record("actor/pg_clipfrac_low", Mean((policy.clipped_low & mask).sum(), tokens))
        record("actor/ratio_max", Max(torch.where(mask, policy.ratio, 1.0).max()))
        record("actor/ratio_min", Min(torch.where(mask, policy.ratio, 1.0).min()))
    return LossTerms(loss, parts, kl_from_old=Mean(moved.sum(), tokens))


def loss_inputs(
    new_log_probs: Float[Tensor, "rows response"],
    states: Float[Tensor, "rows response width"],
    batch: Minibatch,
    actor: Policy,
    old_policy: Policy | None,
) -> LossInputs:
    """Gather what the policy loss reads; the KL from the old policy is exact where that is here."""
    return LossInputs(
        new_log_probs=new_log_probs,
        old_log_probs=batch.old_log_probs,
        advantages=batch.policy_advantages,
        mask=batch.response_mask,
        kl_from_old=None if old_policy is None else exact_kl(old_policy, actor, states, batch),
    )


def snapshot_old_policy(roles: Roles, config: Config) -> Policy | None:
    """Copy the actor before it moves, where the loss reads its whole distribution."""
    return roles.actor.snapshot() if config.actor.update.needs_old_policy else None


def exact_kl(
    old_policy: Policy,
    actor: Policy,
    states: Float[Tensor, "rows response width"],
    batch: Minibatch,
) -> Float[Tensor, "rows response"]:
    """Return KL(pi_old || pi_new) per token, summed over the vocabulary."""
    with torch.no_grad():
        old_states = old_policy.states(batch.sequences)
    return actor.full_kl(old_policy.head, old_states, actor.head, states, batch.response_mask)


def kl_to_reference(
    new_log_probs: Float[Tensor, "rows response"],
    states: Float[Tensor, "rows response width"],
    batch: Minibatch,
    roles: Roles,
    config: Config,
) -> Float[Tensor, "rows response"]:
    """The KL term of the loss, a token, by the estimator and weighting of `kl.in_loss`."""
    settings, mask = config.kl.in_loss, batch.response_mask
    if settings.estimator == "full":
        return roles.reference.full_kl(roles.actor, states, batch.sequences, mask)
    kl = estimate_kl(settings.estimator, new_log_probs, batch.ref_log_probs, mask)
    if settings.by_ratio:
        return kl * log_ratio(new_log_probs, batch.old_log_probs).exp()
    return kl


def next_penalty_coef(
    experience: Experience, roles: Roles, config: Config, controls: Controls
) -> float:
    """PPO-Penalty's adaptive weight, by the KL measured once after the last step."""
    update = config.actor.update
    if not isinstance(update, PenaltyUpdate) or update.controller == "fixed":
        return controls.penalty_coef
    mask = experience.response_mask
    final = roles.actor.log_probs(experience.sequences, mask)
    kl = masked_mean(k3(experience.old_log_probs, final, mask), mask)
    return adaptive_penalty(controls.penalty_coef, float(kl), update.target)


def update_jointly(
    experience: Experience, roles: Roles, config: Config, iteration: int, controls: Controls
) -> Report:
    """The policy's terms plus critic.coef times the value loss, over the same states."""
    report = Report(new_log_probs=experience.old_log_probs.clone())
    old_policy = snapshot_old_policy(roles, config)

    def compute(batch: Minibatch) -> LossTerms:
        states = roles.actor.states(batch.sequences)
        policy = policy_terms(batch, states, roles, config, controls, report, old_policy)
        value = value_terms(batch, roles.critic.values_from_states(states), config, report)
        loss = policy.loss + config.critic.coef * value.loss
        return LossTerms(loss, {**policy.parts, **value.parts}, policy.kl_from_old)

    walk_minibatches(
        experience, actor_walk(roles, config, iteration), roles.actor_optimizer, compute, report
    )
    report.penalty_coef = next_penalty_coef(experience, roles, config, controls)
    return report


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
