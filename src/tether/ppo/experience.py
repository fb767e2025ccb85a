"""What an iteration computes from a rollout before the updates: old log-probs and values, rows to
leave out, importance weights."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.importance import (
    correction_weights,
    effective_share,
    mean_gap,
    mismatch,
    mismatch_kl,
)
from tether.config import Config
from tether.data.batching import join, length_mask
from tether.models.critic import split_values
from tether.models.forward import map_microbatches, states_before_tokens, trunk
from tether.models.policy import Policy
from tether.ppo.roles import Roles
from tether.run.metrics import Event, Last, Meter, events_of_all
from tether.types import ALL_HERE, Experience, Rollout, Rows, Scores, Sequences

LogProbsAndValues = tuple[
    Float[Tensor, "rows response"], Float[Tensor, "rows response"], Float[Tensor, " rows"]
]


def old_log_probs_and_values(
    rollout: Rollout,
    sequences: Sequences,
    mask: Bool[Tensor, "rows response"],
    roles: Roles,
    config: Config,
) -> LogProbsAndValues:
    """Return old log-probs and values of the True cells, and the value after each row's last token.

    With a shared trunk both come from one forward pass.
    """
    if config.rollout.reuse_log_probs:
        old_log_probs = torch.where(mask, rollout.rollout_log_probs, 0.0)
    elif config.critic.shared_trunk and config.has_critic:
        return _by_shared_trunk(sequences, mask, roles)
    else:
        old_log_probs = roles.actor.log_probs(sequences, mask)
    return old_log_probs, *roles.critic.values(sequences, mask)


def _by_shared_trunk(
    sequences: Sequences, mask: Bool[Tensor, "rows response"], roles: Roles
) -> LogProbsAndValues:
    """Apply both heads to the same states."""
    actor, critic = roles.actor, roles.critic

    def both_heads(part: Sequences, own: Bool[Tensor, "rows response"]) -> LogProbsAndValues:
        states = states_before_tokens(trunk(actor.model), part)
        log_probs, _ = actor.log_probs_and_entropies(states[:, :-1], part, own)
        return log_probs, *split_values(critic.values_from_states(states), part)

    log_probs, values, final_values = map_microbatches(
        sequences, mask, mask.shape[1], actor.microbatch_tokens, both_heads
    )
    return log_probs, torch.where(mask, values, 0.0), final_values


def drop_non_finite_rows(
    scores: Scores,
    mask: Bool[Tensor, "rows response"],
    rollout_log_probs: Float[Tensor, "rows response"],
    old_log_probs: Float[Tensor, "rows response"],
    ref_log_probs: Float[Tensor, "rows response"],
    values: Float[Tensor, "rows response"],
    values_after: Float[Tensor, " rows"],
    numbers: Rows = ALL_HERE,
) -> tuple[Scores, list[Event]]:
    """Take rows with a NaN or an infinity out of the batch, as if unscored, with an event each."""
    culprits = {
        "rollout_log_probs": ~finite_rows(rollout_log_probs, mask),
        "old_log_probs": ~finite_rows(old_log_probs, mask),
        "ref_log_probs": ~finite_rows(ref_log_probs, mask),
        "values": ~(finite_rows(values, mask) & (values_after.isfinite() | ~mask.any(dim=1))),
    }
    bad = torch.stack(list(culprits.values())).any(dim=0)
    events = []
    for row in bad.nonzero().squeeze(1).tolist():
        names = ", ".join(name for name, rows in culprits.items() if rows[row])
        message = f"{names} not finite; the row was left out"
        events.append(Event("non_finite_row", message, numbers.number(row)))
    return scores.without(bad) if events else scores, events_of_all(events, numbers)


def finite_rows(
    x: Float[Tensor, "rows response"], mask: Bool[Tensor, "rows response"]
) -> Bool[Tensor, " rows"]:
    """Return the rows without a NaN or an infinity in a True cell."""
    return (x.isfinite() | ~mask).all(dim=1)


def zero_masked(mask: Bool[Tensor, "rows response"], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return each tensor with 0 where the mask is False."""
    return tuple(torch.where(mask, x, 0.0) for x in tensors)


def unmask_observations(rollout: Rollout, actor: Policy) -> Rollout:
    """Treat tool output as if the policy had sampled it: `rollout.state_masking: false`.

    The sampler did not draw those tokens, so their log-probs come from the training forward. The
    ablation of Search-R1's masking, Jin et al. 2025, arXiv 2503.09516.
    """
    lengths, width = rollout.response_lengths, rollout.response_mask.shape[1]
    everything = length_mask(lengths, width).to(rollout.response_mask.device)
    log_probs = actor.log_probs(join(rollout), everything)
    return replace(
        rollout,
        response_mask=everything,
        rollout_log_probs=torch.where(rollout.response_mask, rollout.rollout_log_probs, log_probs),
    )


def rollout_correction(
    rollout: Rollout,
    old_log_probs: Float[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
    config: Config,
) -> Float[Tensor, "rows response"]:
    """Return the weights by which `rollout.correction` multiplies the policy loss per token.

    1 where the kind is none; see `algo/importance.py`.
    """
    settings = config.correction
    d = mismatch(old_log_probs, rollout.rollout_log_probs, mask)
    return correction_weights(settings.kind, d, mask, settings.cap)


def record_mismatch(meter: Meter, rollout: Rollout, experience: Experience, config: Config) -> None:
    """Record how far the sampler's log-probs are from the trainer's: per token, or per row."""
    mask, rows = experience.response_mask, experience.rows
    d = mismatch(experience.old_log_probs, rollout.rollout_log_probs, mask)
    weighed = (d.sum(dim=1), mask.any(dim=1)) if config.correction.kind == "sequence" else (d, mask)
    share = effective_share(*weighed, rows)
    meter.record("rollout/log_prob_diff_mean", Last(mean_gap(d, mask, rows)))
    meter.record("rollout/mismatch_kl", Last(mismatch_kl(d, mask, rows)))
    meter.record("rollout/effective_share", Last(share))
