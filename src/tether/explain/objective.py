"""The actor's objective on the traced row, term by term, by the trainer's own loss."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tether.algo.losses import POLICY_LOSSES, LossInputs, PolicyLoss, cpi_policy_loss, policy_loss
from tether.config import Config, CpiUpdate
from tether.config.algorithm import AnyUpdate
from tether.ppo.updates.minibatches import make_minibatch
from tether.run.writer import shortest_floats
from tether.types import Experience, Minibatch


def whole_batch(experience: Experience, config: Config) -> Minibatch:
    """Return all rows as the one minibatch of a traced update."""
    rows = torch.arange(len(experience))
    longest = config.rollout.max_response_tokens
    return make_minibatch(experience, rows, config.aggregation, longest)


def is_surrogate(update: AnyUpdate) -> bool:
    """Return whether the objective is L^CPI itself."""
    return POLICY_LOSSES[update.kind] is cpi_policy_loss


def objective(update: AnyUpdate, inputs: LossInputs, batch: Minibatch) -> dict[str, Any]:
    """Return the terms of row 0, one number per token; an objective is a loss with its sign turned.

    `clipped_terms` is None unless the objective is the smaller of two terms.
    """
    surrogate = policy_loss(CpiUpdate(kind="cpi"), inputs)
    loss = policy_loss(update, inputs)
    weights, length = batch.weights[0], int(batch.sequences.response_lengths[0])

    def numbers(x: Tensor) -> list[float]:
        return shortest_floats(x[0, :length] + 0.0)  # + 0.0 turns -0.0 into 0.0

    def total(per_token: Tensor) -> float:
        return numbers((weights * per_token[0]).sum().reshape(1, 1))[0]

    clipped = loss.with_clipped_ratio
    return {
        "new_log_probs": numbers(inputs.new_log_probs),
        "ratio": numbers(surrogate.ratio),
        "objective_ratio": numbers(loss.ratio),
        "cpi_terms": numbers(-surrogate.per_token),
        "clipped_terms": None if clipped is None else numbers(-clipped),
        "objective_terms": numbers(-loss.per_token),
        "verdicts": token_verdicts(update, inputs)[:length],
        "l_cpi": total(-surrogate.per_token),
        "objective": total(-loss.per_token),
    }


def token_verdicts(update: AnyUpdate, inputs: LossInputs) -> list[str]:
    """Return what the bound did to each token of row 0, as a word that `words` spells out."""
    leaf = inputs.new_log_probs.detach().requires_grad_()
    with torch.enable_grad():
        loss = policy_loss(update, replace(inputs, new_log_probs=leaf))
        [gradient] = torch.autograd.grad(loss.per_token.sum(), leaf)
    return [_verdict(loss, inputs, gradient, t) for t in range(inputs.mask.shape[1])]


def _verdict(loss: PolicyLoss, inputs: LossInputs, gradient: Tensor, t: int) -> str:
    if not inputs.mask[0, t]:
        return "masked"
    if loss.outside is None:
        return "no_bound"
    if inputs.advantages[0, t] == 0:
        return "no_advantage"
    if not loss.outside[0, t]:
        return "inside"
    if loss.clipped[0, t] and gradient[0, t] != 0:
        return "capped"
    if loss.clipped_dual[0, t]:
        return "clipped_dual"
    side = "high" if loss.ratio[0, t] > 1 else "low"
    return f"clipped_{side}" if loss.clipped[0, t] else f"kept_{side}"
