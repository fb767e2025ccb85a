"""One iteration of PPO, whole, in the order in which the data flows."""

from tether.algo.advantages import (
    AdvantageInputs,
    bootstrap_values,
    estimate_advantages,
    place_scores,
    shape_rewards,
)
from tether.algo.kl import estimate_kl
from tether.algo.masked import masked_moments, whiten
from tether.config import Config
from tether.data.batching import join
from tether.dist.interrupt import Interrupt
from tether.ppo.experience import (
    correct,
    drop_non_finite_rows,
    mask_states,
    read_before_updates,
    zero_masked,
)
from tether.ppo.result import (
    Clock,
    Controls,
    Outcome,
    call_events,
    moments_events,
    refuse_failing_tools,
)
from tether.ppo.roles import Roles
from tether.ppo.scoring import score_greedy, score_rollout
from tether.ppo.selfcheck import check_rewards_add_up
from tether.ppo.updates.actor import update_actor, update_critic
from tether.rollout.sampler import Draw
from tether.types import Experience


def run_iteration(
    iteration: int,
    controls: Controls,
    roles: Roles,
    config: Config,
    interrupt: Interrupt | None = None,
) -> Outcome:
    """Sample rows, judge them, learn from them, drop them."""
    clock = Clock()

    # The actor answers the prompts.
    prompts = roles.train_prompts.for_iteration(
        iteration, config.rollout.prompts, config.seed, config.data.shuffle
    ).repeat(config.rollout.samples_per_prompt)
    roles.sampler.sync(roles.actor.model, iteration)
    rollout = roles.sampler.run(roles.episodes(prompts), Draw(config.seed, "token", iteration))
    refuse_failing_tools(rollout, config)
    clock.lap("rollout")

    # The reward scores each response; a row without a score leaves here, from all that follows.
    scores, events = score_rollout(prompts, rollout, roles, config)
    greedy_scores = score_greedy(prompts, roles, config)
    rollout = mask_states(rollout, roles.actor, config.rollout.state_masking)
    mask = rollout.response_mask & scores.usable[:, None]
    clock.lap("reward")

    # Actor, reference and critic read every token as they are before the updates.
    sequences = join(rollout)
    old_log_probs, values, values_after = read_before_updates(
        rollout, sequences, mask, roles, config
    )
    ref_log_probs = roles.reference.log_probs(sequences, mask, old_log_probs)
    numbers = rollout.rollout_log_probs, old_log_probs, ref_log_probs, values, values_after
    scores, unreadable = drop_non_finite_rows(scores, mask, *numbers)
    mask = mask & scores.usable[:, None]
    old_log_probs, ref_log_probs, values = zero_masked(mask, old_log_probs, ref_log_probs, values)
    clock.lap("forward")

    # The score lands on the last token; every token pays for leaving the reference.
    kl = estimate_kl(config.kl.in_reward.estimator, old_log_probs, ref_log_probs, mask)
    token_level_scores = place_scores(scores.values, mask)
    token_level_rewards = shape_rewards(token_level_scores, kl, controls.beta)
    check_rewards_add_up(token_level_rewards, scores, kl, controls.beta)

    # Was each token better than the critic expected? Returns teach it, advantages the actor.
    final_values = bootstrap_values(values_after, rollout.truncated, config.advantage.truncation)
    inputs = AdvantageInputs(
        rewards=token_level_rewards,
        values=values,
        final_values=final_values,
        scores=scores.values,
        greedy_scores=greedy_scores,
        mask=mask,
        samples=config.rollout.samples_per_prompt,
    )
    advantages = estimate_advantages(config.advantage, inputs)
    returns = advantages + values
    moments = masked_moments(advantages, mask)
    policy_advantages = (
        whiten(advantages, mask, moments) if config.advantage.whitens else advantages
    )

    experience = Experience(
        sequences=sequences,
        response_mask=mask,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        kl=kl,
        values=values,
        final_values=final_values,
        token_level_scores=token_level_scores,
        token_level_rewards=token_level_rewards,
        advantages=advantages,
        returns=returns,
        policy_advantages=policy_advantages,
        correction_weights=correct(rollout, old_log_probs, mask, config),
    )
    if interrupt is not None:
        interrupt.hold()  # weights move from here on: a signal waits until both have
    critic_report = update_critic(experience, roles, config, iteration)
    actor_report = update_actor(experience, roles, config, iteration, controls)
    clock.lap("update")

    return Outcome(
        iteration=iteration,
        controls=controls,
        prompts=prompts,
        rollout=rollout,
        scores=scores,
        greedy_scores=greedy_scores,
        experience=experience,
        moments=moments,
        actor=actor_report,
        critic=critic_report,
        events=[
            *call_events(rollout),
            *events,
            *unreadable,
            *moments_events(moments, config),
            *critic_report.events,
            *actor_report.events,
        ],
        seconds=clock.seconds,
    )
