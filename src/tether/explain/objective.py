"""The actor's objective on the traced row, term by term, at given weights."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.losses import PolicyLoss, cpi_policy_loss
from tether.config import Config
from tether.models.policy import Policy
from tether.ppo.result import Controls
from tether.ppo.roles import Roles
from tether.ppo.updates.actor import policy_loss
from tether.ppo.updates.minibatches import make_minibatch
from tether.run.writer import shortest_floats
from tether.types import Experience, Minibatch


def whole_batch(experience: Experience, config: Config) -> Minibatch:
    """All rows as the one minibatch of a traced update."""
    rows = torch.arange(len(experience))
    longest = config.rollout.max_response_tokens
    return make_minibatch(experience, rows, config.aggregation, longest)


@torch.no_grad()
def objective(
    new_log_probs: Float[Tensor, "rows response"],
    states: Float[Tensor, "rows response width"],
    batch: Minibatch,
    roles: Roles,
    config: Config,
    controls: Controls,
    old_policy: Policy | None,
) -> dict[str, Any]:
    """What the actor maximises where it gives these log-probs.

    PPO-Penalty's exact KL reads `states` against `old_policy`. Before an update, where it is 0,
    there is no need of either, and `old_policy` is None.
    """
    if config.actor.update.kind == "trpo":  # the bare surrogate; the bound is on the step
        loss = cpi_policy_loss(new_log_probs, batch.old_log_probs, batch.policy_advantages)
    else:
        loss = policy_loss(new_log_probs, states, batch, roles, config, controls, old_policy)
    return _terms(loss, new_log_probs, batch, config)


def _terms(
    loss: PolicyLoss, new_log_probs: Tensor, batch: Minibatch, config: Config
) -> dict[str, Any]:
    """Row 0, a number a token; an objective is a loss with the sign turned."""
    surrogate = cpi_policy_loss(new_log_probs, batch.old_log_probs, batch.policy_advantages)
    bounds = clip_range(config)
    weights, length = batch.weights[0], int(batch.sequences.response_lengths[0])

    def numbers(x: Tensor) -> list[float]:
        return shortest_floats(x[0, :length] + 0.0)  # + 0.0 turns -0.0 into 0.0

    def total(per_token: Tensor) -> float:
        return numbers((weights * per_token[0]).sum().reshape(1, 1))[0]

    held = None if bounds is None else loss.ratio.clamp(*bounds)
    return {
        "new_log_probs": numbers(new_log_probs),
        "ratio": numbers(surrogate.ratio),
        "objective_ratio": numbers(loss.ratio),
        "cpi_terms": numbers(-surrogate.per_token),
        "clipped_terms": None if held is None else numbers(held * batch.policy_advantages),
        "objective_terms": numbers(-loss.per_token),
        "verdicts": [
            _verdict(*cell, bounds)
            for cell in zip(
                loss.ratio[0, :length].tolist(),
                batch.policy_advantages[0, :length].tolist(),
                (loss.clipped_high | loss.clipped_low)[0, :length].tolist(),
                batch.response_mask[0, :length].tolist(),
                strict=True,
            )
        ],
        "l_cpi": total(-surrogate.per_token),
        "objective": total(-loss.per_token),
    }


def clip_range(config: Config) -> tuple[float, float] | None:
    """The ratios between which nothing is clipped; none for kinds without a clip."""
    update = config.actor.update
    if not hasattr(update, "eps_low"):
        return None
    return 1 - update.eps_low, 1 + update.eps_high


def _verdict(
    ratio: float, advantage: float, clipped: bool, counts: bool, bounds: tuple[float, float] | None
) -> str:
    """Why a token's term is clipped or not, as a word that `words` spells out."""
    if not counts:
        return "masked"
    if bounds is None:
        return "no_clip"
    if advantage == 0:
        return "no_advantage"
    low, high = bounds
    if low <= ratio <= high:
        return "inside"
    side = "high" if ratio > high else "low"
    if clipped and side == "high" and advantage < 0:
        return "clipped_dual"
    return f"clipped_{side}" if clipped else f"kept_{side}"
