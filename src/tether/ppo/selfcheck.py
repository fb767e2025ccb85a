"""Checks, before the first update, that what must hold in theory holds here and now."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.algo.advantages import place_scores, shape_rewards
from tether.algo.kl import k1
from tether.config import Config
from tether.data.batching import join, microbatches
from tether.dist.world import world
from tether.errors import RunStopped
from tether.models.forward import layer_stack, trunk
from tether.models.policy import Policy
from tether.ppo.roles import Roles
from tether.rollout.own_rows import everywhere, sample_own
from tether.rollout.sampler import Draw
from tether.types import ALL_HERE, Rows, Scores, Sequences

PROMPTS = 16


@dataclass(frozen=True)
class Bounds:
    """How far two log-probs of one token may be apart that differ by rounding alone."""

    ratio: float  # two training forwards, largest difference of a token
    sampler: float  # sampler and training forward, largest difference of a token
    mean: float  # either, mean over the tokens


# Of a bfloat16 logit between 16 and 32 the last bit is worth 0.125. SmolLM2-135M's sampler was off
# by 0.10 at most and 0.028 on average; mistakes in positions, masks or weights are larger.
MOST_OF_ANOTHER_ENGINE = 0.5  # mean over the tokens; weights that did not arrive are off by nats
BOUNDS = {"float32": Bounds(1e-5, 1e-4, 1e-4), "bfloat16": Bounds(1.0, 1.0, 0.1)}
# These are of models of so many layers. Rounding adds up over more, and other kernels round more:
# as much as the same rows differ that are read in other batches, where that is not a mistake.
LAYERS, REPEATS, MOST_BY_REPEAT = 8, 4.0, 10.0


def tolerances(number_format: str, layers: int, repeat: float) -> Bounds:
    """Return the bounds of a model of so many layers whose log-probs move by `repeat` in another
    batch; bfloat16's are as wide as they can be and still find a mistake."""
    usual = BOUNDS[number_format]
    if number_format == "bfloat16":
        return usual
    deep = max(1.0, layers / LAYERS)
    wide = min(MOST_BY_REPEAT, max(1.0, REPEATS * repeat / (usual.ratio * deep)))
    return Bounds(*(deep * wide * bound for bound in (usual.ratio, usual.sampler, usual.mean)))


def check_rewards_add_up(
    token_level_rewards: Float[Tensor, "rows response"],
    scores: Scores,
    kl: Float[Tensor, "rows response"],
    beta: float,
    rows: Rows = ALL_HERE,
) -> None:
    """Refuse token rewards that do not sum to each row's score minus beta times its KL.

    `token_level_rewards` and `kl` are rows x response.
    """
    expected = torch.where(scores.usable, scores.values, 0.0) - beta * kl.sum(dim=1)
    error = rows.everyone((token_level_rewards.sum(dim=1) - expected).abs()).max()
    # Of all tokens, as rewards of turns may cancel out.
    size = rows.everyone(token_level_rewards.abs().sum(dim=1)).max()
    if not error <= 1e-4 * (1 + size):
        raise RunStopped(f"Token rewards differ from score - beta*KL by {float(error):.2g}.")


def check_start(roles: Roles, config: Config, fresh: bool = True) -> str:
    """Sample a few rows, check the first numbers of training, and return the findings.

    Before the first update the ratio of new to old policy is 1. Where the reference has the
    actor's weights, as in a fresh run, the KL is 0. The sampler's log-probs equal those of the
    training forward. Each is held to the bound of the coarsest number format at work, of the
    model's depth, and of what the same rows differ by in another batch.
    """
    prompts = roles.train_prompts.first(min(PROMPTS, config.rows))
    roles.sampler.sync(roles.actor.model, 0)
    choice = Draw(config.seed, "self-check", 0)
    _, own = sample_own(roles.sampler, roles.episodes, prompts, choice)
    rollout = everywhere(own)
    sequences, mask = roles.actor.with_lower_states(join(rollout)), rollout.response_mask
    old_log_probs = roles.actor.log_probs(sequences, mask)
    ref_log_probs = roles.reference.log_probs(sequences, mask, old_log_probs)
    new_log_probs = torch.zeros_like(old_log_probs)
    for rows in _microbatches(sequences, roles.actor, config):
        part = sequences.select(rows)
        found = _log_probs_with_gradients(roles.actor, part, mask[rows, : part.width])
        new_log_probs[rows, : part.width] = found

    coarse = "bfloat16" in (config.model.dtype, config.model.compute)
    number_format = "bfloat16" if coarse else "float32"
    repeat = _repeat_gap(roles.actor, sequences, mask, old_log_probs)
    layers = len(layer_stack(trunk(roles.actor.model)))
    bounds = tolerances(number_format, layers, repeat)
    ratio_gap = (new_log_probs - old_log_probs).detach()[mask].abs()
    sampler_gap = (rollout.rollout_log_probs - old_log_probs).detach()[mask].abs()
    what = f"in {number_format} the first ratio is not 1: new and old log-probs"
    _refuse_gap(what, ratio_gap, bounds.ratio, bounds.mean)
    if config.rollout.sampler == "local":
        what = f"in {number_format} sampler and training forward"
        _refuse_gap(what, sampler_gap, bounds.sampler, bounds.mean)
    else:  # its kernels differ, which is measured and corrected; other weights are not
        _refuse_other_weights(sampler_gap, config.rollout.sampler)
    parts = [
        f"ratio 1 ({_plus_minus(ratio_gap)})",
        f"sampler = trainer ({_plus_minus(sampler_gap)})",
    ]

    kl = k1(old_log_probs, ref_log_probs, mask)
    same = fresh and config.model.reference in (None, config.model.actor)
    same = same and config.model.reference_system_prompt is None
    if same and config.kl.needs_reference:
        kl_gap = kl[mask].abs()
        if config.model.reference_dtype in (None, config.model.dtype):
            what = f"in {number_format} KL to an equal reference is not 0: log-probs"
            _refuse_gap(what, kl_gap, bounds.ratio, bounds.mean)
        parts.append(f"KL to reference 0 ({_plus_minus(kl_gap)})")

    every = torch.ones_like(mask[:, 0])
    scores = Scores(torch.ones_like(old_log_probs[:, 0]), every, every)
    beta = config.kl.in_reward.coef
    rewards = shape_rewards(place_scores(scores.values, mask), kl, beta)
    check_rewards_add_up(rewards, scores, kl, beta)
    return ", ".join([*parts, "rewards = score - beta*KL"])


def _repeat_gap(
    actor: Policy,
    sequences: Sequences,
    mask: Bool[Tensor, "rows response"],
    log_probs: Float[Tensor, "rows response"],
) -> float:
    """Return by how much log-probs of the first half of the rows move if they are read alone."""
    rows = torch.arange(max(1, len(sequences.ids) // 2))
    part = sequences.select(rows)
    counted = mask[rows, : part.width]
    again = actor.log_probs(part, counted)
    gap = (again - log_probs[rows, : part.width])[counted].abs()
    return float(gap.max()) if gap.numel() else 0.0


def _microbatches(
    sequences: Sequences, actor: Policy, config: Config
) -> Iterator[Int[Tensor, " some"]]:
    """Yield row numbers in groups no larger than those of an update.

    `tether check` plans memory for updates, so the self-check must not need more.
    """
    own_rows = math.ceil(config.actor.minibatch_rows / world().replicas)
    for rows in torch.arange(len(sequences.ids)).split(own_rows):
        limits = config.actor.microbatch_tokens, actor.max_cached_cells
        for group in microbatches(sequences.select(rows), *limits):
            yield rows[group]


def _log_probs_with_gradients(
    actor: Policy, part: Sequences, mask: Bool[Tensor, "rows response"]
) -> Float[Tensor, "rows response"]:
    """Return log-probs by the path of an update; the graph is freed on return."""
    log_probs, _ = actor.log_probs_and_entropies(actor.states(part), part, mask)
    return log_probs.detach()


def _plus_minus(gap: Float[Tensor, " tokens"]) -> str:
    return f"±{float(gap.max()):.0e}"


def _refuse_other_weights(gap: Float[Tensor, " tokens"], engine: str) -> None:
    mean = float(gap.mean())
    if not mean <= MOST_OF_ANOTHER_ENGINE:
        raise RunStopped(
            f"Self-check failed: the log-probs of {engine} and of the training forward differ by "
            f"{mean:.2g} on average, more than {MOST_OF_ANOTHER_ENGINE:g}: it does not sample from "
            f"the actor's weights. Use a version of {engine} that knows this model, or "
            f"rollout.sampler local."
        )


def _refuse_gap(what: str, gap: Float[Tensor, " tokens"], most: float, most_in_mean: float) -> None:
    largest, mean = float(gap.max()), float(gap.mean())
    if not (largest <= most and mean <= most_in_mean):
        raise RunStopped(
            f"Self-check failed: {what} differ by up to {largest:.2g} and {mean:.2g} on average, "
            f"more than {most:g} or {most_in_mean:g}; the model's forward pass is not repeatable, "
            f"so no ratio would mean anything."
        )
