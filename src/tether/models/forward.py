"""The only place where a network is called, and where positions are shifted by one.

Training forwards read right-padded `Sequences` and need no attention mask. The sampler's forwards
read prompts into a key-value cache and go on from it, whatever number of tokens comes next.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tether.data.batching import own_microbatches
from tether.dist.collectives import all_reduce_sum
from tether.dist.fsdp import release_gathered
from tether.models.kv_cache import SlotCache
from tether.types import Sequences


@dataclass(frozen=True)
class Network:
    """A module whose weights belong to one role: to be sharded, counted and saved together."""

    module: nn.Module
    trunk: nn.Module | None = None  # the submodule with the layers; None if there are no layers
    called: nn.Module | None = None  # what a forward pass calls; None is the module itself


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
    hidden = all_states(trunk, sequences.ids)
    columns = torch.arange(sequences.width + 1, device=hidden.device)
    source = (sequences.prompt_lengths[:, None] - 1 + columns).clamp(max=hidden.shape[1] - 1)
    return hidden.gather(1, source[:, :, None].expand(-1, -1, hidden.shape[2]))


def all_states(
    trunk: nn.Module, ids: Int[Tensor, "rows length"]
) -> Float[Tensor, "rows length width"]:
    """The state after each token of right-padded rows."""
    with _recomputing(trunk):
        return trunk(input_ids=ids, use_cache=False).last_hidden_state


@torch.no_grad()
def logits_come_from_head(model: PreTrainedModel) -> bool:
    """Whether the model's logits are its output head over its states, and nothing more."""
    ids = torch.tensor([[0, 1, 2]], device=model.device)
    states = trunk(model)(input_ids=ids, use_cache=False).last_hidden_state
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.allclose(model.get_output_embeddings()(states), logits, rtol=1e-3, atol=1e-3)


def recompute_in_backward(model: PreTrainedModel) -> None:
    """Let a forward with gradients keep one state per layer from now on, and no more."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in _layers(model):
        layer._gradient_checkpointing_func = _checkpointed


def _layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def _checkpointed(function: partial, *states: object) -> object:
    """Run a layer as transformers asks, but not in training mode: OPT and Falcon ask the layer
    itself whether there is dropout."""
    layer = function.func.__self__

    def run(*states: object) -> object:
        told, layer.training = layer.training, False
        try:
            return function(*states)
        finally:
            layer.training = told

    return checkpoint(run, *states, use_reentrant=False)


@contextmanager
def _recomputing(trunk: nn.Module) -> Iterator[None]:
    """transformers recomputes layers in training mode only. Ours is never in it, for the dropout,
    so the layers are told that they are, without what is in them, only where gradients are, and
    only until they run (`_checkpointed`)."""
    layers = _layers(trunk)
    wanted = torch.is_grad_enabled()
    for layer in layers:
        layer.training = wanted and layer.gradient_checkpointing
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@torch.no_grad()
def prefill(
    trunk: nn.Module,
    cache: SlotCache,
    ids: Int[Tensor, "prompts length"],
    lengths: Sequence[int],
    slots: Sequence[Sequence[int]],
) -> Float[Tensor, "prompts width"]:
    """Read right-padded prompts into the cache, each once, whichever number of slots it is for;
    the state after the last token of each."""
    cache.start_rows(slots, lengths, ids.shape[1])
    hidden = trunk(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
    return _last(hidden, lengths)


@torch.no_grad()
def decode_step(
    trunk: nn.Module,
    cache: SlotCache,
    ids: Int[Tensor, "rows length"],
    lengths: Sequence[int],
    slots: Sequence[Sequence[int]],
) -> Float[Tensor, "rows width"]:
    """Read more tokens of rows that the cache holds; the state after the last of each."""
    positions, allowed = cache.extend_rows(slots, lengths, ids.shape[1])
    float_type = next(trunk.parameters()).dtype
    mask = torch.zeros(allowed.shape, dtype=float_type, device=ids.device)
    with grouped_attention(trunk):
        hidden = trunk(
            input_ids=ids,
            attention_mask=mask.masked_fill_(~allowed, -torch.inf),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
    return _last(hidden, lengths)


def _last(
    hidden: Float[Tensor, "rows length width"], lengths: Sequence[int]
) -> Float[Tensor, "rows width"]:
    last = torch.tensor(lengths, device=hidden.device) - 1
    return hidden[torch.arange(len(last), device=hidden.device), last]


@contextmanager
def grouped_attention(trunk: nn.Module) -> Iterator[None]:
    """Inside, one new token a row attends without a copy of the keys for each query head."""
    config = trunk.config
    usual = config._attn_implementation
    if usual == "sdpa":
        config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = usual


def _grouped_attention(
    module: nn.Module,
    query: Float[Tensor, "rows heads length width"],
    key: Float[Tensor, "rows groups columns width"],
    value: Float[Tensor, "rows groups columns width"],
    attention_mask: Float[Tensor, "rows 1 length columns"],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **ignored: object,
) -> tuple[Float[Tensor, "rows length heads width"], None]:
    """The query heads that share a key head stand in for the length, if that is 1: they attend to
    the same keys under the same mask."""
    rows, heads, length, width = query.shape
    groups = key.shape[1]
    if sliding_window is not None and key.shape[2] > sliding_window:
        attention_mask = _within(sliding_window, attention_mask)
    if length == 1:
        query = query.view(rows, groups, heads // groups, width)
    elif groups < heads:
        key = key.repeat_interleave(heads // groups, dim=1)
        value = value.repeat_interleave(heads // groups, dim=1)
    found = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling
    )
    return found.reshape(rows, heads, length, -1).transpose(1, 2), None


def _within(
    window: int, mask: Float[Tensor, "rows 1 length columns"]
) -> Float[Tensor, "rows 1 length columns"]:
    """Of what a token may attend to, the last `window` columns alone."""
    last = (mask == 0).sum(dim=-1, keepdim=True) - 1
    columns = torch.arange(mask.shape[-1], device=mask.device)
    return mask.masked_fill(columns <= last - window, -torch.inf)


GROUPED = "tether_grouped"
AttentionInterface.register(GROUPED, _grouped_attention)


MicrobatchFunction = Callable[[Sequences, Int[Tensor, " some"]], tuple[Tensor, ...]]


@torch.no_grad()
def map_microbatches(
    sequences: Sequences, width: int, max_tokens: int, read: MicrobatchFunction
) -> tuple[Tensor, ...]:
    """What `read` finds of each microbatch and its row numbers, a number a row or a number a
    response token, in the order of all rows and `width` columns."""
    whole: tuple[Tensor, ...] | None = None
    try:
        for part in own_microbatches(sequences, max_tokens):
            found = read(sequences.select(part.rows), part.rows)
            if whole is None:
                whole = tuple(_blank(len(sequences.ids), width, piece) for piece in found)
            if part.idle:
                continue
            for all_rows, piece in zip(whole, found, strict=True):
                place = (part.rows,) if piece.ndim == 1 else (part.rows, slice(piece.shape[1]))
                all_rows[place] = piece
    finally:
        release_gathered()
    return tuple(
        all_reduce_sum(all_rows) for all_rows in whole
    )  # whoever has not read a row adds 0


def _blank(rows: int, width: int, piece: Tensor) -> Tensor:
    return piece.new_zeros((rows, width)[: piece.ndim])
