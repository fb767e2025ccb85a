"""One iteration of PPO from prompts to updated weights, in the order in which the data flows."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tether.algo.advantages import (
    AdvantageInputs,
    bootstrap_values,
    critic_returns,
    estimate_advantages,
    place_scores,
    shape_rewards,
)
from tether.algo.kl import estimate_kl
from tether.algo.masked import masked_moments, whiten
from tether.config import Config
from tether.data.batching import join
from tether.dist.interrupt import Interrupt
from tether.ppo.ahead import Ahead
from tether.ppo.experience import (
    drop_non_finite_rows,
    old_log_probs_and_values,
    rollout_correction,
    unmask_observations,
    zero_masked,
)
from tether.ppo.result import (
    Clock,
    Controls,
    Outcome,
    call_events,
    moments_events,
)
from tether.ppo.roles import Roles
from tether.ppo.sampling import sample_batch
from tether.ppo.scoring import score_greedy, weighted_parts
from tether.ppo.selfcheck import check_rewards_add_up
from tether.ppo.updates.actor import update_actor
from tether.ppo.updates.critic import update_critic
from tether.run.metrics import Event
from tether.types import Experience, Moments, Rollout, Scores


def run_iteration(
    iteration: int,
    controls: Controls,
    roles: Roles,
    config: Config,
    interrupt: Interrupt | None = None,
    ahead: Ahead | None = None,
) -> Outcome:
    """Sample a batch of responses, score them, and update critic and actor on them.

    Of several processes each samples and keeps rows of its own; groups, sums and minibatches are
    those of all rows.

    With `ahead` the batch is one that was sampled some iterations ago (`rollout.lag`).

    Shapes: rows x response, but for scores and final values, which are one number per row.
    """
    clock = Clock()

    # Rollout: the actor samples a response to each prompt, as it was after the last iteration.
    # Scores: one number per response. A row that could not be scored is masked from here on.
    if ahead is None:
        batch = sample_batch(iteration, controls, roles, config, clock)
    else:
        batch = ahead.take(iteration, roles, config, clock)
    rows = batch.rollout.rows
    greedy_scores = score_greedy(batch.prompts, rows, roles, config, iteration)
    clock.lap("reward")

    made = make_experience(batch.rollout, batch.scores, greedy_scores, controls.beta, roles, config)
    clock.lap("forward")

    # Updates: several epochs of minibatches on these rows, first the critic, then the actor.
    if interrupt is not None:
        interrupt.hold()  # a signal now waits until both have moved
    critic_report = update_critic(made.experience, roles, config, iteration)
    actor_report = update_actor(made.experience, roles, config, iteration, controls)
    clock.lap("update")

    return Outcome(
        iteration=iteration,
        controls=controls,
        prompts=batch.prompts,
        dropped=batch.dropped,
        drawn=batch.drawn,
        rollout=made.rollout,
        scores=made.scores,
        greedy_scores=greedy_scores,
        experience=made.experience,
        moments=made.moments,
        actor=actor_report,
        critic=critic_report,
        events=[
            *call_events(made.rollout),
            *batch.events,
            *made.events,
            *critic_report.events,
            *actor_report.events,
        ],
        seconds=clock.seconds,
    )


@dataclass(frozen=True)
class MadeExperience:
    """What the updates learn from, and what changed on the way to it."""

    rollout: Rollout  # with observations unmasked, where so configured
    scores: Scores  # without rows that have a number that is not finite
    experience: Experience
    moments: Moments  # of the advantages, as used by whitening
    events: list[Event]


def make_experience(
    rollout: Rollout,
    scores: Scores,
    greedy_scores: Float[Tensor, " rows"],
    beta: float,
    roles: Roles,
    config: Config,
) -> MadeExperience:
    """Compute log-probs, values, rewards, advantages and returns of scored responses."""
    if not config.rollout.state_masking:
        rollout = unmask_observations(rollout, roles.actor)
    mask = rollout.response_mask & scores.usable[:, None]

    # Forward passes before any update: actor, critic and reference on every sampled token.
    sequences = roles.actor.with_lower_states(join(rollout, roles.share_prompts))
    old_log_probs, values, values_after = old_log_probs_and_values(
        rollout, sequences, mask, roles, config
    )
    ref_log_probs = roles.reference.log_probs(sequences, mask, old_log_probs)
    scores, non_finite_events = drop_non_finite_rows(
        scores,
        mask,
        rollout.rollout_log_probs,
        old_log_probs,
        ref_log_probs,
        values,
        values_after,
        rollout.rows,
    )
    mask = mask & scores.usable[:, None]
    old_log_probs, ref_log_probs, values = zero_masked(mask, old_log_probs, ref_log_probs, values)

    # Rewards: the score on the last token, or by turn or token where the reward says so, minus
    # beta x KL to the reference on every token.
    kl = estimate_kl(config.kl.in_reward.estimator, old_log_probs, ref_log_probs, mask)
    token_level_scores = place_scores(scores.values, mask, scores.token_values)
    token_level_rewards = shape_rewards(token_level_scores, kl, beta)
    check_rewards_add_up(token_level_rewards, scores, kl, beta, rollout.rows)

    # Advantages train the actor, returns the critic.
    final_values = bootstrap_values(values_after, rollout.truncated, config.advantage.truncation)
    inputs = AdvantageInputs(
        rewards=token_level_rewards,
        values=values,
        final_values=final_values,
        scores=scores.values,
        greedy_scores=greedy_scores,
        mask=mask,
        samples=config.rollout.samples_per_prompt,
        parts=weighted_parts(scores, config),
        kl_penalty=beta * kl,
        rows=rollout.rows,
    )
    advantages = estimate_advantages(config.advantage, inputs)
    returns = critic_returns(config.advantage, inputs, advantages, config.critic.lam)
    moments = masked_moments(advantages, mask, rollout.rows)
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
        correction_weights=rollout_correction(rollout, old_log_probs, mask, config),
        rows=rollout.rows,
    )
    return MadeExperience(
        rollout=rollout,
        scores=scores,
        experience=experience,
        moments=moments,
        events=[*non_finite_events, *moments_events(moments, config)],
    )
