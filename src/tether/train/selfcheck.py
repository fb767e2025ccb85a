"""Does what must hold in theory hold on this machine, with this model, today?"""

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.kl import k1
from tether.algo.rewards import place_scores, shape_rewards
from tether.config import Config
from tether.data.collate import join, microbatches
from tether.errors import RunStopped
from tether.rollout.episode import Draw
from tether.train.roles import Roles
from tether.types import Scores

PROMPTS = 16
RATIO_TOLERANCE = 1e-5
SAMPLER_TOLERANCE = 1e-4


def check_rewards_add_up(
    token_level_rewards: Float[Tensor, "rows response"],
    scores: Scores,
    kl: Float[Tensor, "rows response"],
    beta: float,
) -> None:
    """The token rewards of every row sum to its score minus beta times its KL."""
    expected = torch.where(scores.usable, scores.values, 0.0) - beta * kl.sum(dim=1)
    error = (token_level_rewards.sum(dim=1) - expected).abs().max()
    if not error <= 1e-4 * (1 + expected.abs().max()):
        raise RunStopped(f"Token rewards differ from score - beta*KL by {float(error):.2g}.")


def check_start(roles: Roles, config: Config, fresh: bool = True) -> str:
    """Sample a few rows and hold the first numbers of training to what they must be.

    Before the first update the new policy is the old one: the ratio is 1. Where the reference has
    the actor's weights, as in a fresh run, the KL is 0. The sampler's log-probs are the training
    forward's.
    """
    prompts = roles.train_prompts.first(PROMPTS)
    roles.sampler.sync(roles.actor.model, 0)
    rollout = roles.sampler.run(roles.episodes(prompts), Draw(config.seed, "self-check", 0))
    sequences, mask = join(rollout), rollout.response_mask
    old_log_probs = roles.actor.log_probs(sequences, mask)
    ref_log_probs = roles.reference.log_probs(sequences, mask, old_log_probs)
    new_log_probs = torch.zeros_like(old_log_probs)
    # As an update reads them, in its microbatches: what fits there has to fit here.
    actor, most = roles.actor, config.actor.microbatch_tokens
    for rows in microbatches(sequences, most, actor.cells_at_once):
        part = sequences.select(rows)
        found, _ = actor.read(actor.states(part), part, mask[rows, : part.width])
        new_log_probs[rows, : part.width] = found.detach()

    exact = config.model.dtype != "bfloat16"
    ratio_gap = _largest(new_log_probs - old_log_probs)
    sampler_gap = _largest(rollout.rollout_log_probs - old_log_probs)
    _hold("the first ratio is not 1: new and old log-probs", ratio_gap, RATIO_TOLERANCE, exact)
    own = config.rollout.sampler == "local"  # another engine's gap is measured and corrected
    _hold("sampler and training forward", sampler_gap, SAMPLER_TOLERANCE, exact and own)
    parts = [f"ratio 1 (±{ratio_gap:.0e})", f"sampler = trainer (±{sampler_gap:.0e})"]

    kl = k1(old_log_probs, ref_log_probs, mask)
    same = fresh and config.model.reference in (None, config.model.actor)
    if same and config.kl.needs_reference:
        kl_gap = _largest(kl)
        alike = config.model.reference_dtype in (None, config.model.dtype)
        what = "KL to an equal reference is not 0: log-probs"
        _hold(what, kl_gap, RATIO_TOLERANCE, exact and alike)
        parts.append(f"KL to reference 0 (±{kl_gap:.0e})")

    everywhere = torch.ones_like(mask[:, 0])
    scores = Scores(torch.ones_like(old_log_probs[:, 0]), everywhere, everywhere)
    beta = config.kl.in_reward.coef
    rewards = shape_rewards(place_scores(scores.values, mask), kl, beta)
    check_rewards_add_up(rewards, scores, kl, beta)
    return ", ".join([*parts, "rewards = score - beta*KL"])


def _largest(gap: Tensor) -> float:
    return float(gap.detach().abs().max())


def _hold(what: str, gap: float, tolerance: float, exact: bool) -> None:
    # In lower precision the gap is reported, not a reason to stop.
    if exact and not gap <= tolerance:
        raise RunStopped(
            f"Self-check failed: {what} differ by {gap:.2g}, more than {tolerance:g}; "
            f"the model's forward pass is not repeatable, so no ratio would mean anything."
        )
