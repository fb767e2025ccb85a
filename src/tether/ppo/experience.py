"""What actor and critic say of every token before the updates, in as few passes as it takes."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
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
from tether.run.metrics import Event, Last, Meter
from tether.types import Experience, Rollout, Scores, Sequences

Read = tuple[Float[Tensor, "rows response"], Float[Tensor, "rows response"], Float[Tensor, " rows"]]


def read_before_updates(
    rollout: Rollout,
    sequences: Sequences,
    mask: Bool[Tensor, "rows response"],
    roles: Roles,
    config: Config,
) -> Read:
    """Old log-probs and values of the True cells, and the value after each row's last token."""
    if config.rollout.reuse_log_probs:
        old_log_probs = torch.where(mask, rollout.rollout_log_probs, 0.0)
    elif config.critic.shared_trunk and config.has_critic:
        return _read_once(sequences, mask, roles)
    else:
        old_log_probs = roles.actor.log_probs(sequences, mask)
    return old_log_probs, *roles.critic.values(sequences, mask)


def _read_once(sequences: Sequences, mask: Bool[Tensor, "rows response"], roles: Roles) -> Read:
    """Both heads over one pass of the trunk that they share."""
    actor, critic = roles.actor, roles.critic

    def read(part: Sequences, rows: Int[Tensor, " some"]) -> Read:
        states = states_before_tokens(trunk(actor.model), part)
        log_probs, _ = actor.log_probs_and_entropies(states[:, :-1], part, mask[rows, : part.width])
        return log_probs, *split_values(critic.values_from_states(states), part)

    log_probs, values, final_values = map_microbatches(
        sequences, mask.shape[1], actor.microbatch_tokens, read
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
) -> tuple[Scores, list[Event]]:
    """Rows that hold a NaN or an infinity leave, as unscorable ones do, with an event each."""
    culprits = {
        "rollout_log_probs": ~finite_rows(rollout_log_probs, mask),
        "old_log_probs": ~finite_rows(old_log_probs, mask),
        "ref_log_probs": ~finite_rows(ref_log_probs, mask),
        "values": ~(finite_rows(values, mask) & (values_after.isfinite() | ~mask.any(dim=1))),
    }
    bad = torch.stack(list(culprits.values())).any(dim=0)
    if not bool(bad.any()):
        return scores, []
    events = []
    for row in bad.nonzero().squeeze(1).tolist():
        names = ", ".join(name for name, rows in culprits.items() if rows[row])
        events.append(Event("non_finite_row", f"{names} not finite; the row was left out", row))
    return scores.without(bad), events


def finite_rows(
    x: Float[Tensor, "rows response"], mask: Bool[Tensor, "rows response"]
) -> Bool[Tensor, " rows"]:
    return (x.isfinite() | ~mask).all(dim=1)


def zero_masked(mask: Bool[Tensor, "rows response"], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The True cells as they are, 0 elsewhere."""
    return tuple(torch.where(mask, x, 0.0) for x in tensors)


def mask_states(rollout: Rollout, actor: Policy, state_masking: bool) -> Rollout:
    """The rollout as it is, or with every observed token taken for a sampled one.

    Nobody drew those, so their log-probs are the training forward's.
    """
    if state_masking:
        return rollout
    lengths, width = rollout.response_lengths, rollout.response_mask.shape[1]
    everything = length_mask(lengths, width)
    log_probs = actor.log_probs(join(rollout), everything)
    return replace(
        rollout,
        response_mask=everything,
        rollout_log_probs=torch.where(rollout.response_mask, rollout.rollout_log_probs, log_probs),
    )


def correct(
    rollout: Rollout,
    old_log_probs: Float[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
    config: Config,
) -> Float[Tensor, "rows response"]:
    """What `rollout.correction` multiplies each token's policy loss by; 1 where it is none."""
    settings = config.rollout.corrected_by
    d = mismatch(old_log_probs, rollout.rollout_log_probs, mask)
    return correction_weights(settings.kind, d, mask, settings.cap)


def record_mismatch(meter: Meter, rollout: Rollout, experience: Experience, config: Config) -> None:
    """How far sampler and trainer are apart, where they may be: by tokens, or by whole rows."""
    mask = experience.response_mask
    d = mismatch(experience.old_log_probs, rollout.rollout_log_probs, mask)
    by_row = config.rollout.corrected_by.kind == "sequence"
    share = effective_share(d.sum(dim=1), mask.any(dim=1)) if by_row else effective_share(d, mask)
    meter.record("rollout/log_prob_diff_mean", Last(mean_gap(d, mask)))
    meter.record("rollout/mismatch_kl", Last(mismatch_kl(d, mask)))
    meter.record("rollout/effective_share", Last(share))
