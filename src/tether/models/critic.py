"""The critic: a trunk with one linear value head."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.models.forward import map_microbatches, states_before_tokens, trunk
from tether.types import Sequences


class Critic(nn.Module):
    """V(state before token t). The head starts at zero, so the first values are exactly 0.

    Given the actor's own model, the head stands on the actor's trunk and both learn together.
    Whatever of the trunk learns, the head always does.
    """

    def __init__(self, model: PreTrainedModel, microbatch_tokens: int) -> None:
        super().__init__()
        self.trunk = trunk(model)
        # The head learns, so it is float32 at least, whatever a frozen trunk is.
        float_type = torch.promote_types(model.dtype, torch.float32)
        self.head = nn.Linear(model.config.hidden_size, 1, dtype=float_type, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.float_type = float_type
        self.microbatch_tokens = microbatch_tokens

    def forward(self, sequences: Sequences) -> Float[Tensor, "rows states"]:
        """Values before every response token and, in column `response_lengths`, after the last."""
        return self.values_from_states(states_before_tokens(self.trunk, sequences))

    def values_from_states(
        self, states: Float[Tensor, "rows states width"]
    ) -> Float[Tensor, "rows states"]:
        # A copy, as sharded weights are gathered by a hook on what comes out, and a view loses it.
        return self.head(states.to(self.float_type)).squeeze(-1).to(self.float_type, copy=True)

    def values(
        self, sequences: Sequences, mask: Bool[Tensor, "rows response"]
    ) -> tuple[Float[Tensor, "rows response"], Float[Tensor, " rows"]]:
        """Values of the True cells, and the value after each row's last token."""

        def read(part: Sequences, rows: Int[Tensor, " some"]) -> tuple[Tensor, Tensor]:
            return split_values(self(part), part)

        values, final_values = map_microbatches(
            sequences, mask.shape[1], self.microbatch_tokens, read
        )
        return torch.where(mask, values, 0.0), final_values


def split_values(
    values: Float[Tensor, "rows states"], sequences: Sequences
) -> tuple[Float[Tensor, "rows response"], Float[Tensor, " rows"]]:
    """The value before each response token, and the one after the last."""
    return values[:, :-1], values.gather(1, sequences.response_lengths[:, None]).squeeze(1)


class NoCritic:
    """For estimators that ask for no values: all 0, and nothing is loaded or computed."""

    def values(
        self, sequences: Sequences, mask: Bool[Tensor, "rows response"]
    ) -> tuple[Float[Tensor, "rows response"], Float[Tensor, " rows"]]:
        zeros = torch.zeros(mask.shape, device=mask.device)
        return zeros, zeros[:, 0]
