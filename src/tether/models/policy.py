"""The actor: a causal language model as a policy."""

import copy

from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from tether.models.forward import states_before_tokens, trunk
from tether.models.heads import Head, cells_at_once, token_full_kl, token_log_probs_and_entropies
from tether.models.passes import read_all
from tether.types import Sequences


class Policy:
    """Log-probs of response tokens under one model at one temperature.

    Old, new and reference log-probs all come from `states` and `read`: one path, no dropout.
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
    def cells_at_once(self) -> int:
        """Response tokens of a microbatch whose probabilities can wait for the backward pass."""
        return cells_at_once(self.head)

    def states(self, sequences: Sequences) -> Float[Tensor, "rows response width"]:
        """The state before each response token, with gradients."""
        return states_before_tokens(trunk(self.model), sequences)[:, :-1]

    def read(
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
            log_probs, _ = self.read(self.states(part), part, mask[rows, : part.width])
            return (log_probs,)

        (log_probs,) = read_all(sequences, mask.shape[1], self.microbatch_tokens, read)
        return log_probs
