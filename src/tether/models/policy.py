"""The actor, and the reference that scores its tokens: a causal language model as a policy."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from tether.data.collate import microbatches
from tether.models.forward import states_before_tokens, trunk
from tether.models.heads import token_log_probs_and_entropies
from tether.types import Sequences


class Policy:
    """Log-probs of response tokens under one model at one temperature.

    Old, new and reference log-probs all come from `evaluate`: one code path, no dropout.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, microbatch_tokens: int) -> None:
        self.model = model
        self.temperature = temperature
        self.microbatch_tokens = microbatch_tokens

    def evaluate(
        self, sequences: Sequences, mask: Bool[Tensor, "rows response"]
    ) -> tuple[Float[Tensor, "rows response"], Float[Tensor, "rows response"]]:
        """Log-probs and entropies of the True cells, in one forward, with gradients."""
        states = states_before_tokens(trunk(self.model), sequences)[:, :-1]
        return token_log_probs_and_entropies(
            self.model.get_output_embeddings(),
            states,
            sequences.response_ids,
            mask,
            self.temperature,
            self.model.config.vocab_size,
        )

    @torch.no_grad()
    def log_probs(
        self, sequences: Sequences, mask: Bool[Tensor, "rows response"]
    ) -> Float[Tensor, "rows response"]:
        """Log-probs of the True cells, microbatch by microbatch, without gradients."""
        float_type = torch.promote_types(self.model.dtype, torch.float32)
        result = torch.zeros(mask.shape, dtype=float_type, device=mask.device)
        for rows in microbatches(sequences, self.microbatch_tokens):
            part = sequences.select(rows)
            result[rows, : part.width], _ = self.evaluate(part, mask[rows, : part.width])
        return result
