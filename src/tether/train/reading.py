"""What actor and critic say of every token before the updates, in as few passes as it takes."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.config import Config
from tether.data.collate import microbatches
from tether.models.forward import states_before_tokens
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


@torch.no_grad()
def _read_once(sequences: Sequences, mask: Bool[Tensor, "rows response"], roles: Roles) -> Read:
    """Both heads over one pass of the trunk that they share."""
    actor, critic = roles.actor, roles.critic
    log_probs, values = (
        torch.zeros(mask.shape, dtype=critic.float_type, device=mask.device) for _ in range(2)
    )
    final_values = torch.zeros(len(mask), dtype=critic.float_type, device=mask.device)
    for rows in microbatches(sequences, actor.microbatch_tokens):
        part = sequences.select(rows)
        states = states_before_tokens(critic.trunk, part)
        found = critic.read(states)
        values[rows, : part.width] = found[:, :-1]
        final_values[rows] = found.gather(1, part.response_lengths[:, None]).squeeze(1)
        log_probs[rows, : part.width], _ = actor.read(
            states[:, :-1], part, mask[rows, : part.width]
        )
    return log_probs, torch.where(mask, values, 0.0), final_values
