"""The trunk of Llama and its relatives as a sampler on a CPU runs it: in few operations.

Beside the products of a few rows, the time goes into starting operations: transformers starts some
fifty per layer. These models' layers differ in nothing that matters here, so they are written out
once, with queries, keys and values as one product of packed weights, gate and up projection as
another. `LeanTrunk` is called as the trunk itself is; other models are sampled by their own trunk.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import FloatTensor, Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from tether.models.forward import attends_to_whole_rows, cached_attention, output_head, trunk
from tether.models.kv_cache import SlotCache
from tether.models.packed_weights import can_be_packed, packed_product, packed_weights

LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
Turn = tuple[Float[Tensor, "#rows length 1 depth"], Float[Tensor, "#rows length 1 depth"]]


@contextmanager
def packed_trunk(
    model: PreTrainedModel, longest_row: int
) -> Iterator["PreTrainedModel | LeanTrunk"]:
    """Pack the model's weights meanwhile; yield what a sampler is to run as its trunk."""
    network = trunk(model)
    if can_be_lean(network, longest_row):
        with packed_weights(output_head(model)):
            yield LeanTrunk(network)
    else:
        with packed_weights(model):
            yield network


def can_be_lean(trunk: PreTrainedModel, longest_row: int) -> bool:
    """Tell whether its layers are of the kind written out here, and see whole rows."""
    kinds = {type(layer).__name__ for layer in getattr(trunk, "layers", ())}
    return (
        bool(kinds)
        and kinds <= LAYERS
        and attends_to_whole_rows(trunk, longest_row)
        and can_be_packed(trunk)
    )


class LeanTrunk(nn.Module):
    """A trunk with packed copies of its layers' weights: make it anew when they have changed."""

    def __init__(self, trunk: PreTrainedModel) -> None:
        super().__init__()
        self.trunk = cast(Any, trunk)
        self.config = trunk.config
        self.layers = [LeanLayer(layer) for layer in self.trunk.layers]

    def forward(
        self,
        input_ids: Int[Tensor, "rows length"],
        past_key_values: SlotCache,
        position_ids: Int[Tensor, "rows length"] | None = None,
        attention_mask: Float[Tensor, "rows 1 length columns"] | None = None,
        **ignored: object,
    ) -> BaseModelOutputWithPast:
        """Return the states after each token, as transformers does.

        Without positions and mask, the tokens are the first of their rows.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        states = self.trunk.embed_tokens(input_ids)
        cos, sin = self.trunk.rotary_emb(states, position_ids)
        # The first half of a head is turned by minus the sine.
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        turn = cos[:, :, None], sin[:, :, None]
        for number, layer in enumerate(self.layers):
            states = layer(states, turn, past_key_values, number, attention_mask)
        after = cast(FloatTensor, _normed(self.trunk.norm, states))
        return BaseModelOutputWithPast(last_hidden_state=after)


SamplingTrunk = PreTrainedModel | LeanTrunk


class LeanLayer:
    """A decoder layer whose products are packed."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention = attention
        into = attention.q_proj, attention.k_proj, attention.v_proj
        self.heads = [item.out_features // attention.head_dim for item in into]
        self.before_attention, self.before_mlp = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
        )
        self.queries_keys_values = packed_product(*into)
        self.after_attention = packed_product(attention.o_proj)
        self.gate_and_up = packed_product(mlp.gate_proj, mlp.up_proj)
        self.activation, self.down = mlp.act_fn, packed_product(mlp.down_proj)

    def __call__(
        self,
        states: Float[Tensor, "rows length width"],
        turn: Turn,
        cache: SlotCache,
        number: int,
        mask: Tensor | None,
    ) -> Float[Tensor, "rows length width"]:
        """Return the states after this layer, and keep its keys and values in the cache."""
        found = self._attended(_normed(self.before_attention, states), turn, cache, number, mask)
        states = states + found
        gate, up = self.gate_and_up(_normed(self.before_mlp, states)).chunk(2, dim=-1)
        return states + self.down(self.activation(gate) * up)

    def _attended(
        self,
        states: Float[Tensor, "rows length width"],
        turn: Turn,
        cache: SlotCache,
        number: int,
        mask: Tensor | None,
    ) -> Float[Tensor, "rows length width"]:
        attention = self.attention
        heads = self.queries_keys_values(states).unflatten(-1, (-1, attention.head_dim))
        query, key, value = heads.split(self.heads, dim=2)
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
            turned = _turned(torch.cat((query, key), dim=2), turn)
        else:
            turned = _turned(heads[:, :, : -self.heads[2]], turn)
        query, key = turned.transpose(1, 2).split(self.heads[:2], dim=1)
        key, value = cache.update(key, value.transpose(1, 2), number)
        found, _ = cached_attention(attention, query, key, value, mask, attention.scaling)
        return self.after_attention(found.flatten(2))


def _turned(
    heads: Float[Tensor, "rows length heads depth"], turn: Turn
) -> Float[Tensor, "rows length heads depth"]:
    """Rotate queries and keys by their positions (RoPE, arXiv 2104.09864)."""
    cos, sin = turn
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return torch.addcmul(heads * cos, swapped, sin)


def _normed(
    norm: nn.Module, states: Float[Tensor, "rows length width"]
) -> Float[Tensor, "rows length width"]:
    """Return the normalised states, by one operation where the format is float32 throughout."""
    weight = cast(Tensor, norm.weight)
    if states.dtype == weight.dtype == torch.float32:
        return rms_norm(states, weight.shape, weight, cast(float, norm.variance_epsilon))
    return norm(states)
