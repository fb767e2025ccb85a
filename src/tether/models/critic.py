"""The critic: a trunk with one linear value head."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.models.forward import Network, map_microbatches, states_before_tokens, trunk
from tether.models.weights import load_trainable_parameters, trainable_parameters
from tether.support.transfer import to_device
from tether.types import Sequences


@runtime_checkable
class ValueFunction(Protocol):
    """The role of the critic: estimates V(state before token t)."""

    def __call__(self, sequences: Sequences) -> Float[Tensor, "rows states"]:
        """Return values with gradients, before every response token and after the last."""
        ...

    def values_from_states(
        self, states: Float[Tensor, "rows states width"]
    ) -> Float[Tensor, "rows states"]:
        """Return values of hidden states that the caller has computed, with gradients."""
        ...

    def values(
        self, sequences: Sequences, mask: Bool[Tensor, "rows response"]
    ) -> tuple[Float[Tensor, "rows response"], Float[Tensor, " rows"]]:
        """Return values of the True cells and the value after each row's last token."""
        ...

    def networks(self) -> list[Network]:
        """Return what the critic has beside the actor's weights."""
        ...

    def state(self) -> Mapping[str, Tensor]:
        """Return the tensors that a checkpoint restores, by name; empty if there are none."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy back what `state` returned."""
        ...


class Critic(nn.Module):
    """A trunk and a linear value head, which starts at zero: the first values are exactly 0.

    With `shared_trunk` the model is the actor's own, and its trunk learns from both losses.
    The head learns even where the trunk is frozen. Without `reads_lower_states` its lower layers
    are other than the actor's, so it starts from the ids. The head is on `head_device` where the
    model's weights have not been read yet.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        microbatch_tokens: int,
        shared_trunk: bool = False,
        reads_lower_states: bool = True,
        head_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.trunk = trunk(model)
        self.shared_trunk = shared_trunk
        self.reads_lower_states = reads_lower_states
        # The head learns, so it is float32 at least, even on a frozen bfloat16 trunk.
        float_type = torch.promote_types(model.dtype, torch.float32)
        place = model.device if head_device is None else head_device
        self.head = nn.Linear(model.config.hidden_size, 1, dtype=float_type, device=place)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.float_type = float_type
        self.microbatch_tokens = microbatch_tokens

    def forward(self, sequences: Sequences) -> Float[Tensor, "rows states"]:
        """Return values with gradients, before every response token and after the last.

        Column `response_lengths[row]` has the value after the row's last token.
        """
        readable = sequences if self.reads_lower_states else sequences.from_ids()
        return self.values_from_states(states_before_tokens(self.trunk, readable))

    def values_from_states(
        self, states: Float[Tensor, "rows states width"]
    ) -> Float[Tensor, "rows states"]:
        """Return values of hidden states that the caller has computed, with gradients."""
        # A copy, as sharded weights are gathered by a hook on what comes out, and a view loses it.
        return self.head(states.to(self.float_type)).squeeze(-1).to(self.float_type, copy=True)

    def values(
        self, sequences: Sequences, mask: Bool[Tensor, "rows response"]
    ) -> tuple[Float[Tensor, "rows response"], Float[Tensor, " rows"]]:
        """Return values of the True cells and the value after each row's last token."""

        def read(part: Sequences, mask: Bool[Tensor, "rows response"]) -> tuple[Tensor, Tensor]:
            return split_values(self(part), part)

        values, final_values = map_microbatches(
            sequences, mask, mask.shape[1], self.microbatch_tokens, read
        )
        return torch.where(mask, values, 0.0), final_values

    def networks(self) -> list[Network]:
        """Return the head alone where the trunk is the actor's, else the whole critic."""
        return [Network(self.head) if self.shared_trunk else Network(self, self.trunk)]

    def state(self) -> Mapping[str, Tensor]:
        """Return the weights that learn; those of a shared trunk are among them."""
        return trainable_parameters(self)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy back what `state` returned."""
        load_trainable_parameters(self, tensors)


def split_values(
    values: Float[Tensor, "rows states"], sequences: Sequences
) -> tuple[Float[Tensor, "rows response"], Float[Tensor, " rows"]]:
    """Split a row's values into those before each response token and the one after the last."""
    last = to_device(sequences.response_lengths[:, None], values.device)
    return values[:, :-1], values.gather(1, last).squeeze(1)


class NoCritic:
    """The critic of estimators that need no values: all are 0, and nothing is computed."""

    def __call__(self, sequences: Sequences) -> Float[Tensor, "rows states"]:
        """Return zeros."""
        return torch.zeros(len(sequences.ids), sequences.width + 1, device=sequences.ids.device)

    def values_from_states(
        self, states: Float[Tensor, "rows states width"]
    ) -> Float[Tensor, "rows states"]:
        """Return zeros."""
        return torch.zeros(states.shape[:2], device=states.device)

    def values(
        self, sequences: Sequences, mask: Bool[Tensor, "rows response"]
    ) -> tuple[Float[Tensor, "rows response"], Float[Tensor, " rows"]]:
        """Return zeros."""
        zeros = torch.zeros(mask.shape, device=mask.device)
        return zeros, zeros.sum(dim=1)

    def networks(self) -> list[Network]:
        """Return none."""
        return []

    def state(self) -> Mapping[str, Tensor]:
        """Return none."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing."""
