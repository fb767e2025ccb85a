"""The reference: the policy that the tether is tied to."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from tether.models.adapters import adapter_off
from tether.models.policy import Policy
from tether.types import Sequences


class FrozenReference:
    """A copy of a model that never learns."""

    def __init__(self, model: PreTrainedModel, temperature: float, microbatch_tokens: int) -> None:
        self.policy = Policy(model.requires_grad_(False), temperature, microbatch_tokens)

    def log_probs(
        self,
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
        old_log_probs: Float[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        return self.policy.log_probs(sequences, mask)

    def full_kl(
        self,
        actor: Policy,
        actor_states: Float[Tensor, "rows response width"],
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        """KL(actor || reference) over the vocabulary, with gradients to the actor's states."""
        with torch.no_grad():
            states = self.policy.states(sequences)
        return actor.full_kl(actor.head, actor_states, self.policy.head, states, mask)

    def refresh(self, actor: Policy) -> None:
        """Freeze again at the actor as it is now."""
        self.policy.model.load_state_dict(actor.model.state_dict())


class AdapterOffReference:
    """The actor's own base, its adapter off: a reference that costs no weights."""

    def __init__(self, actor: Policy) -> None:
        self.actor = actor

    def log_probs(
        self,
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
        old_log_probs: Float[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        with adapter_off(self.actor.model):
            return self.actor.log_probs(sequences, mask)

    def full_kl(
        self,
        actor: Policy,
        actor_states: Float[Tensor, "rows response width"],
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        """KL(actor || reference) over the vocabulary; both read their states by one frozen head."""
        with torch.no_grad(), adapter_off(self.actor.model):
            states = self.actor.states(sequences)
        return actor.full_kl(actor.head, actor_states, actor.head, states, mask)


class NoReference:
    """No tether: the actor stands in for its own reference, so the KL is 0 without a pass."""

    def log_probs(
        self,
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
        old_log_probs: Float[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        return old_log_probs
