"""The actor: a causal language model as a policy."""

import copy

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from tether.models.forward import map_microbatches, states_before_tokens, trunk
from tether.models.lora import adapter_off
from tether.models.token_log_probs import (
    Head,
    max_cached_cells,
    token_full_kl,
    token_log_probs_and_entropies,
)
from tether.types import Sequences


class Policy:
    """Log-probs of response tokens under one model at one temperature.

    Old, new and reference log-probs all come from `states` and `log_probs_and_entropies`: one
    path, no dropout.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, microbatch_tokens: int) -> None:
        self.model = model
        self.temperature = temperature
        self.microbatch_tokens = microbatch_tokens

    def snapshot(self) -> "Policy":
        """A copy that stays as the policy is now; weights that never move are shared with it."""
        frozen = {id(w): w for w in self.model.parameters() if not w.requires_grad}
        model = copy.deepcopy(self.model, frozen).requires_grad_(False)
        return Policy(model, self.temperature, self.microbatch_tokens)

    @property
    def head(self) -> Head:
        return self.model.get_output_embeddings()

    @property
    def max_cached_cells(self) -> int:
        """Response tokens of a microbatch whose probabilities can wait for the backward pass."""
        return max_cached_cells(self.head)

    def states(self, sequences: Sequences) -> Float[Tensor, "rows response width"]:
        """The state before each response token, with gradients."""
        return states_before_tokens(trunk(self.model), sequences)[:, :-1]

    def log_probs_and_entropies(
        self,
        states: Float[Tensor, "rows response width"],
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
    ) -> tuple[Float[Tensor, "rows response"], Float[Tensor, "rows response"]]:
        """Log-probs and entropies of the True cells."""
        return token_log_probs_and_entropies(
            self.head,
            states,
            sequences.response_ids,
            mask,
            self.temperature,
        )

    def full_kl(
        self,
        p_head: Head,
        p_states: Float[Tensor, "rows response width"],
        q_head: Head,
        q_states: Float[Tensor, "rows response width"],
        mask: Bool[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        """KL(p || q) of two heads over their states, at this policy's temperature."""
        return token_full_kl(p_head, p_states, q_head, q_states, mask, self.temperature)

    def log_probs(
        self, sequences: Sequences, mask: Bool[Tensor, "rows response"]
    ) -> Float[Tensor, "rows response"]:
        """Log-probs of the True cells, microbatch by microbatch, without gradients."""

        def read(part: Sequences, rows: Int[Tensor, " some"]) -> tuple[Tensor]:
            log_probs, _ = self.log_probs_and_entropies(
                self.states(part), part, mask[rows, : part.width]
            )
            return (log_probs,)

        (log_probs,) = map_microbatches(sequences, mask.shape[1], self.microbatch_tokens, read)
        return log_probs


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
