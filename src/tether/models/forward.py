"""The only place where a network is called, and where positions are shifted by one.

Training forwards read right-padded `Sequences` and need no attention mask. Decoding reads
left-padded prompts with one, and goes on from a key-value cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tether.types import Sequences


def trunk(model: PreTrainedModel) -> nn.Module:
    """The network below the language-model head."""
    return model.base_model


def states_before_tokens(
    trunk: nn.Module, sequences: Sequences
) -> Float[Tensor, "rows states width"]:
    """Hidden states from which response tokens are predicted: states = response + 1.

    State t has read everything before response token t, so the logits over it score that token
    and the value over it is the value before it. State `response_lengths[row]` has read the
    whole response. Later states repeat the last one; nobody reads them.
    """
    with _recomputing(trunk):
        hidden = trunk(input_ids=sequences.ids, use_cache=False).last_hidden_state
    columns = torch.arange(sequences.width + 1, device=hidden.device)
    source = (sequences.prompt_lengths[:, None] - 1 + columns).clamp(max=hidden.shape[1] - 1)
    return hidden.gather(1, source[:, :, None].expand(-1, -1, hidden.shape[2]))


@torch.no_grad()
def logits_are_the_heads(model: PreTrainedModel) -> bool:
    """Whether the model's logits are its output head over its states, and nothing more."""
    ids = torch.tensor([[0, 1, 2]], device=model.device)
    states = trunk(model)(input_ids=ids, use_cache=False).last_hidden_state
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.allclose(model.get_output_embeddings()(states), logits, rtol=1e-3, atol=1e-3)


def recompute_in_backward(model: PreTrainedModel) -> None:
    """From now on a forward with gradients keeps one state a layer and no more."""
    model.gradient_checkpointing_enable({"use_reentrant": False})


@contextmanager
def _recomputing(trunk: nn.Module) -> Iterator[None]:
    """transformers recomputes layers in training mode only. Ours is never in it, for the dropout,
    so the layers are told that they are, without what is in them, and only where gradients are."""
    layers = [m for m in trunk.modules() if isinstance(m, GradientCheckpointingLayer)]
    wanted = torch.is_grad_enabled()
    for layer in layers:
        layer.training = wanted and layer.gradient_checkpointing
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@dataclass
class Decoding:
    """Rows under way in the sampler: their cache and which of its columns are real tokens."""

    cache: Cache
    mask: Bool[Tensor, "rows seen"]

    def keep(self, rows: Int[Tensor, " some"]) -> None:
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]


def begin_decoding(
    trunk: nn.Module,
    prompt_ids: Int[Tensor, "rows prompt"],
    prompt_mask: Bool[Tensor, "rows prompt"],
) -> tuple[Decoding, Float[Tensor, "rows width"]]:
    """Read left-padded prompts; the state after the last prompt token of each."""
    positions = (prompt_mask.cumsum(dim=1) - 1).clamp(min=0)
    output = trunk(
        input_ids=prompt_ids,
        attention_mask=prompt_mask.long(),
        position_ids=positions,
        use_cache=True,
    )
    return Decoding(output.past_key_values, prompt_mask), output.last_hidden_state[:, -1]


def decode_next(
    trunk: nn.Module, decoding: Decoding, tokens: Int[Tensor, " rows"]
) -> Float[Tensor, "rows width"]:
    """Read one more token a row; the state after it."""
    decoding.mask = torch.cat([decoding.mask, decoding.mask.new_ones(len(tokens), 1)], dim=1)
    output = trunk(
        input_ids=tokens[:, None],
        attention_mask=decoding.mask.long(),
        position_ids=decoding.mask.sum(dim=1, keepdim=True) - 1,
        past_key_values=decoding.cache,
        use_cache=True,
    )
    return output.last_hidden_state[:, -1]
