"""The rollout correction as a run has it: weights for the policy loss, and what they tell."""

from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.correction import (
    correction_weights,
    effective_share,
    mean_gap,
    mismatch,
    mismatch_kl,
)
from tether.config import Config
from tether.run.metrics import Level, Meter
from tether.types import Experience, Rollout


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
    meter.record("rollout/log_prob_diff_mean", Level(mean_gap(d, mask)))
    meter.record("rollout/mismatch_kl", Level(mismatch_kl(d, mask)))
    meter.record("rollout/effective_share", Level(share))
