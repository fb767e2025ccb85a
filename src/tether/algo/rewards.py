"""From one score a response to one reward a token."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def place_scores(
    scores: Float[Tensor, " rows"], mask: Bool[Tensor, "rows response"]
) -> Float[Tensor, "rows response"]:
    """Each score on the last True cell of its row, once; a row without a True cell gets none."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, -1).amax(dim=1)
    return torch.where(columns == last[:, None], scores[:, None], 0.0)


def shape_rewards(
    token_level_scores: Float[Tensor, "rows response"],
    kl: Float[Tensor, "rows response"],
    beta: float,
) -> Float[Tensor, "rows response"]:
    """score - beta x KL, token by token. `kl` is 0 on masked cells, and so is the result."""
    return token_level_scores - beta * kl
