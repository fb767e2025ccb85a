"""State masking off: the ablation that also trains on what the policy only read."""

from dataclasses import replace

import torch

from tether.data.collate import join, length_mask
from tether.models.policy import Policy
from tether.types import Rollout


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
