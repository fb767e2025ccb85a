"""The actor and the reference: causal language models as policies."""

import copy
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from tether.data.batching import join_pairs
from tether.dist.fsdp import run_head
from tether.models.forward import (
    Network,
    map_microbatches,
    output_head,
    states_before_tokens,
    states_below,
    trunk,
)
from tether.models.lora import adapter_off
from tether.models.token_log_probs import (
    Head,
    max_cached_cells,
    token_full_kl,
    token_log_probs_and_entropies,
)
from tether.models.weights import load_weights, plain_weights
from tether.types import Sequences


class Policy:
    """A causal language model that scores response tokens, at one temperature.

    Old, new and reference log-probs all come from `states` and `log_probs_and_entropies`: one
    path, no dropout. The first `lower_layers` layers are frozen.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        microbatch_tokens: int,
        lower_layers: int = 0,
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.microbatch_tokens = microbatch_tokens
        self.lower_layers = lower_layers

    def snapshot(self) -> "Policy":
        """Return a frozen copy of the policy as it is now; frozen weights are shared with it."""
        frozen = {id(w): w for w in self.model.parameters() if not w.requires_grad}
        model = copy.deepcopy(self.model, frozen).requires_grad_(False)
        return Policy(model, self.temperature, self.microbatch_tokens, self.lower_layers)

    def with_lower_states(self, sequences: Sequences) -> Sequences:
        """Return the rows with the states after the frozen lower layers, if there are any.

        One pass of the training forward, which every later one starts from.
        """
        if self.lower_layers == 0:
            return sequences

        def read(part: Sequences, mask: Bool[Tensor, "rows response"]) -> tuple[Tensor]:
            return (states_below(trunk(self.model), part.ids, self.lower_layers),)

        length, every = sequences.ids.shape[1], torch.ones(len(sequences.ids), 0, dtype=torch.bool)
        (states,) = map_microbatches(sequences, every, length, self.microbatch_tokens, read)
        return replace(sequences, lower_states=states, lower_layers=self.lower_layers)

    @property
    def head(self) -> Head:
        """The linear map from hidden states to logits."""
        return output_head(self.model)

    @property
    def max_cached_cells(self) -> int:
        """Response tokens whose probabilities are cached for the backward pass, at most."""
        return max_cached_cells(self.head)

    def states(self, sequences: Sequences) -> Float[Tensor, "rows response width"]:
        """Return the state before each response token, with gradients."""
        return states_before_tokens(trunk(self.model), sequences)[:, :-1]

    def log_probs_and_entropies(
        self,
        states: Float[Tensor, "rows response width"],
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
    ) -> tuple[Float[Tensor, "rows response"], Float[Tensor, "rows response"]]:
        """Return log-probs and entropies of the True cells, with gradients.

        With the mask on the CPU nothing waits for a GPU.
        """
        return run_head(
            self.head,
            token_log_probs_and_entropies,
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
        """Return KL(p || q) of two heads over their states, at this policy's temperature."""

        def with_q(q: Head, q_states: Tensor, p: Head, p_states: Tensor) -> Tensor:
            return token_full_kl(p, p_states, q, q_states, mask, self.temperature)

        def with_p(p: Head, p_states: Tensor) -> Tensor:
            if q_head is p_head:
                return with_q(p, q_states, p, p_states)
            return run_head(q_head, with_q, q_states, p, p_states)

        return run_head(p_head, with_p, p_states)

    def log_probs(
        self, sequences: Sequences, mask: Bool[Tensor, "rows response"]
    ) -> Float[Tensor, "rows response"]:
        """Return log-probs of the True cells, microbatch by microbatch, without gradients."""

        def read(part: Sequences, mask: Bool[Tensor, "rows response"]) -> tuple[Tensor]:
            log_probs, _ = self.log_probs_and_entropies(self.states(part), part, mask)
            return (log_probs,)

        width = mask.shape[1]
        (log_probs,) = map_microbatches(sequences, mask, width, self.microbatch_tokens, read)
        return log_probs


@runtime_checkable
class Reference(Protocol):
    """The role of the reference: the policy that the KL is measured against."""

    def log_probs(
        self,
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
        old_log_probs: Float[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        """Return log-probs of the True cells; `old_log_probs` are the actor's."""
        ...

    def full_kl(
        self,
        actor: Policy,
        actor_states: Float[Tensor, "rows response width"],
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        """Return KL(actor || reference) over the vocabulary, with gradients to `actor_states`."""
        ...

    def refresh(self, actor: Policy) -> None:
        """Become the actor as it is now."""
        ...

    def networks(self) -> list[Network]:
        """Return what the reference has beside the actor's weights."""
        ...

    def state(self) -> Mapping[str, Tensor]:
        """Return the tensors that a checkpoint restores, by name; empty if there are none."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy back what `state` returned."""
        ...


class FrozenReference:
    """A model of its own that never learns; with `refreshed`, the actor is copied into it.

    `own_names` are its weights that are not the actor's frozen ones, None if all are its own: then
    it computes its own lower states, as those of other weights differ.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        microbatch_tokens: int,
        refreshed: bool = False,
        own_names: Set[str] | None = None,
    ) -> None:
        self.policy = Policy(model.requires_grad_(False), temperature, microbatch_tokens)
        self.refreshed = refreshed
        self.own_names = own_names

    def log_probs(
        self,
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
        old_log_probs: Float[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        """Return log-probs of the True cells."""
        return self.policy.log_probs(self._readable(sequences), mask)

    def full_kl(
        self,
        actor: Policy,
        actor_states: Float[Tensor, "rows response width"],
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        """Return KL(actor || reference) over the vocabulary, with gradients to `actor_states`."""
        with torch.no_grad():
            states = self.policy.states(self._readable(sequences))
        return actor.full_kl(actor.head, actor_states, self.policy.head, states, mask)

    def _readable(self, sequences: Sequences) -> Sequences:
        return sequences.from_ids() if self.own_names is None else sequences

    @torch.no_grad()
    def refresh(self, actor: Policy) -> None:
        """Copy the actor's weights as they are now."""
        if self.own_names is None:
            self.policy.model.load_state_dict(actor.model.state_dict())
            return
        own, learnt = self.policy.model.state_dict(), actor.model.state_dict()
        for name in self.own_names:
            own[name].copy_(learnt[name])

    def networks(self) -> list[Network]:
        """Return the model."""
        model = self.policy.model
        return [Network(model, trunk(model), called=trunk(model))]

    def state(self) -> Mapping[str, Tensor]:
        """Return the weights if they are ever refreshed; others are loaded again as they were."""
        weights = plain_weights(self.policy.model) if self.refreshed else {}
        own = weights if self.own_names is None else self.own_names
        return {name: weight for name, weight in weights.items() if name in own}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy back what `state` returned."""
        load_weights(self.policy.model, tensors)


class AdapterOffReference:
    """The actor with its adapter off: a reference that needs no weights of its own."""

    def __init__(self, actor: Policy) -> None:
        self.actor = actor

    def log_probs(
        self,
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
        old_log_probs: Float[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        """Return log-probs of the True cells under the base model."""
        with adapter_off(self.actor.model):
            return self.actor.log_probs(sequences, mask)

    def full_kl(
        self,
        actor: Policy,
        actor_states: Float[Tensor, "rows response width"],
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        """Return KL(actor || reference) over the vocabulary; both use the same frozen head."""
        with torch.no_grad(), adapter_off(self.actor.model):
            states = self.actor.states(sequences)
        return actor.full_kl(actor.head, actor_states, actor.head, states, mask)

    def refresh(self, actor: Policy) -> None:
        """Refuse: the base below an adapter never moves (the config refuses this earlier)."""
        raise NotImplementedError("a reference that is the actor's base cannot be refreshed")

    def networks(self) -> list[Network]:
        """Return none: the weights are the actor's."""
        return []

    def state(self) -> Mapping[str, Tensor]:
        """Return none."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing."""


class PromptedReference:
    """A reference that reads other prompts than the actor did, before the same responses.

    `prompts` are its token ids by the actor's. With a system turn in them, and the actor's own
    weights below, the KL to it is what the actor lacks of that turn.

    Askell et al. 2021, arXiv 2112.00861, section 2.2 (context distillation).
    """

    def __init__(self, inner: Reference, prompts: Mapping[tuple[int, ...], list[int]]) -> None:
        self.inner, self.prompts = inner, prompts

    def log_probs(
        self,
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
        old_log_probs: Float[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        """Return log-probs of the True cells after the other prompts."""
        return self.inner.log_probs(self._prompted(sequences), mask, old_log_probs)

    def full_kl(
        self,
        actor: Policy,
        actor_states: Float[Tensor, "rows response width"],
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        """Return KL(actor || reference), each after its own prompt."""
        return self.inner.full_kl(actor, actor_states, self._prompted(sequences), mask)

    def _prompted(self, sequences: Sequences) -> Sequences:
        """Put the other prompts in front of the responses."""
        lengths = zip(
            sequences.prompt_lengths.tolist(), sequences.response_lengths.tolist(), strict=True
        )
        pairs = [
            (self.prompts[tuple(row[:prompt])], row[prompt : prompt + response])
            for row, (prompt, response) in zip(sequences.ids.tolist(), lengths, strict=True)
        ]
        found, device = join_pairs(pairs), sequences.ids.device
        places = found.prompt_lengths.to(device), found.response_lengths.to(device)
        return Sequences(found.ids.to(device), *places)

    def refresh(self, actor: Policy) -> None:
        """Refresh the model below."""
        self.inner.refresh(actor)

    def networks(self) -> list[Network]:
        """Return the model below."""
        return self.inner.networks()

    def state(self) -> Mapping[str, Tensor]:
        """Return that of the model below."""
        return self.inner.state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy back what `state` returned."""
        self.inner.load_state(tensors)


class NoReference:
    """The reference of runs without a KL term: the actor itself, so the KL is 0."""

    def log_probs(
        self,
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
        old_log_probs: Float[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        """Return `old_log_probs`, without a forward pass."""
        return old_log_probs

    def full_kl(
        self,
        actor: Policy,
        actor_states: Float[Tensor, "rows response width"],
        sequences: Sequences,
        mask: Bool[Tensor, "rows response"],
    ) -> Float[Tensor, "rows response"]:
        """Return zeros."""
        return torch.zeros(mask.shape, device=actor_states.device)

    def refresh(self, actor: Policy) -> None:
        """Do nothing."""

    def networks(self) -> list[Network]:
        """Return none."""
        return []

    def state(self) -> Mapping[str, Tensor]:
        """Return none."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing."""
