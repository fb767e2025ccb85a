"""What actor and critic say of every token before the updates, in as few passes as it takes."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.config import Config
from tether.models.critic import before_and_after
from tether.models.forward import states_before_tokens
from tether.models.passes import read_all
from tether.train.roles import Roles
from tether.types import Rollout, Sequences

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
        states = states_before_tokens(critic.trunk, part)
        log_probs, _ = actor.read(states[:, :-1], part, mask[rows, : part.width])
        return log_probs, *before_and_after(critic.read(states), part)

    log_probs, values, final_values = read_all(
        sequences, mask.shape[1], actor.microbatch_tokens, read
    )
    return log_probs, torch.where(mask, values, 0.0), final_values
