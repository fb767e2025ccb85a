"""The only place where a network is called, and where positions are shifted by one.

Training forwards take right-padded `Sequences` and need no attention mask. The sampler's forwards
write prompts into a key-value cache and continue from it, by any number of tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from tether.data.loans import MaskedRows, blank_rows, lend
from tether.data.shared_prompts import pack, packed_layout
from tether.dist.fsdp import release_gathered
from tether.dist.world import world
from tether.models.kv_cache import SlotCache
from tether.models.precision import compute_type
from tether.models.prompt_attention import KEYWORD, PackedPrompts
from tether.support.transfer import to_device
from tether.types import Sequences


@dataclass(frozen=True)
class Network:
    """A module whose weights belong to one role: to be sharded, counted and saved together."""

    module: nn.Module
    trunk: nn.Module | None = None  # the submodule with the layers; None if there are no layers
    called: nn.Module | None = None  # what a forward pass calls; None is the module itself


def trunk(model: PreTrainedModel) -> PreTrainedModel:
    """Return the network below the language-model head."""
    return cast(PreTrainedModel, model.base_model)


def output_head(model: PreTrainedModel) -> nn.Linear:
    """Return the linear map from hidden states to logits."""
    return cast(nn.Linear, model.get_output_embeddings())


def states_before_tokens(
    trunk: nn.Module, sequences: Sequences
) -> Float[Tensor, "rows states width"]:
    """Return the hidden states that predict response tokens: states = response + 1.

    State t has seen everything before response token t, so its logits score that token and its
    value is the value before that token. State `response_lengths[row]` has seen the whole
    response. Later states repeat the last one and are not used.
    """
    layout = packed_layout(sequences)
    if layout is not None:
        packed = PackedPrompts(layout, cast(PreTrainedModel, trunk).config)
        return packed.states_before_tokens(packed_states(trunk, sequences, packed))
    hidden = all_states(trunk, sequences.ids, sequences.lower_states, sequences.lower_layers)
    source = sequences.columns_from(-1, sequences.width + 1)
    return hidden.gather(1, source[:, :, None].expand(-1, -1, hidden.shape[2]))


def all_states(
    trunk: nn.Module,
    ids: Int[Tensor, "rows length"],
    lower_states: Float[Tensor, "rows length width"] | None = None,
    lower_layers: int = 0,
) -> Float[Tensor, "rows length width"]:
    """Return the state after each token of right-padded rows.

    With `lower_states`, what the first `lower_layers` layers gave, these are not run again.
    """
    return _call_trunk(trunk, ids, lower_states, lower_layers)


def _call_trunk(
    trunk: nn.Module,
    ids: Int[Tensor, "rows length"],
    lower_states: Float[Tensor, "rows length width"] | None,
    lower_layers: int,
    **inputs: object,
) -> Float[Tensor, "rows length width"]:
    """Run the trunk on ids, or its upper layers on lower states."""
    with _recomputing(trunk):
        if lower_states is None:
            return trunk(input_ids=ids, use_cache=False, **inputs).last_hidden_state
        with _replaced_layers(trunk, range(lower_layers), _Resume(lower_states)):
            return trunk(inputs_embeds=lower_states, use_cache=False, **inputs).last_hidden_state


@torch.no_grad()
def states_below(
    trunk: nn.Module, ids: Int[Tensor, "rows length"], lower_layers: int
) -> Float[Tensor, "rows length width"]:
    """Return the states after the first `lower_layers` layers, without running the others."""
    stack, stop = layer_stack(trunk), _Stop()
    with _replaced_layers(trunk, range(lower_layers, len(stack)), stop):
        trunk(input_ids=ids, use_cache=False)
    return stop.states


def layer_stack(trunk: nn.Module) -> nn.ModuleList:
    """Return the list of the trunk's layers."""
    for module in trunk.modules():
        children = list(module.children()) if isinstance(module, nn.ModuleList) else []
        if children and isinstance(children[-1], GradientCheckpointingLayer):
            return cast(nn.ModuleList, module)
    raise LookupError("the network has no list of layers")


@contextmanager
def _replaced_layers(trunk: nn.Module, numbers: range, by: nn.Module) -> Iterator[None]:
    """Put a module in the place of some layers meanwhile.

    The others keep their places, so each still finds its own kind of attention and window. What
    an architecture does to embeddings before its layers is of no account: `_Resume` ignores it.
    """
    stack = layer_stack(trunk)
    usual = stack._modules
    stack._modules = {k: by if i in numbers else v for i, (k, v) in enumerate(usual.items())}
    try:
        yield
    finally:
        stack._modules = usual


class _Resume(nn.Module):
    """Stands for layers whose output is known, whatever goes in."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return the states."""
        return self.states


class _Stop(nn.Module):
    """Stands for layers that are not needed: keeps the states that would go in."""

    states: Tensor

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return what goes in."""
        self.states = hidden_states
        return hidden_states


class AbsentLayers(nn.Module):
    """Stands for layers, or an embedding, that a role shares with the actor by their states."""

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Refuse: the caller has to bring lower states."""
        raise RuntimeError("this network has no lower layers; give it `Sequences.lower_states`")


@torch.no_grad()
def resumes_above(trunk: nn.Module, lower_layers: int) -> bool:
    """Tell whether a pass from lower states gives what a whole pass gives."""
    ids = torch.tensor([[0, 1, 2]], device=next(trunk.parameters()).device)
    whole = all_states(trunk, ids)
    try:
        found = all_states(trunk, ids, states_below(trunk, ids, lower_layers), lower_layers)
    except (AttributeError, IndexError, LookupError, RuntimeError, TypeError, ValueError):
        return False  # the layers of some architectures return more than their states
    return found.shape == whole.shape and torch.allclose(found, whole, rtol=1e-4, atol=1e-4)


def weights_above_layers(trunk: nn.Module) -> list[nn.Parameter]:
    """Return the weights that the states pass after the last layer: those of the last norm."""
    stack = layer_stack(trunk)
    inside = {id(weight) for weight in stack.parameters()}
    outside = [weight for weight in trunk.parameters() if id(weight) not in inside]
    learnt = [weight.requires_grad for weight in outside]
    width = cast(Any, trunk).config.hidden_size
    states = torch.ones(1, 1, width, device=outside[0].device, dtype=outside[0].dtype)
    try:
        for weight in outside:
            weight.requires_grad_()
        resume = _replaced_layers(trunk, range(len(stack)), _Resume(states))
        # No attention runs; its usual name would have transformers look into `meta` tensors.
        with torch.enable_grad(), resume, grouped_attention(trunk):
            found = trunk(inputs_embeds=states, use_cache=False).last_hidden_state
            slopes = torch.autograd.grad(found.sum(), outside, allow_unused=True)
    finally:
        for weight, flag in zip(outside, learnt, strict=True):
            weight.requires_grad_(flag)
    return [weight for weight, slope in zip(outside, slopes, strict=True) if slope is not None]


def packed_states(
    trunk: nn.Module, sequences: Sequences, packed: PackedPrompts
) -> Float[Tensor, "1 tokens width"]:
    """Return the state after each token of the line that these rows are packed into."""
    layout, lower = packed.layout, sequences.lower_states
    line = layout.rows, layout.columns
    # A mask of four dimensions goes to the attention as it is; without one, transformers would
    # make its own from the positions. This one is not read.
    unused = torch.zeros(1, 1, 1, 1, device=sequences.ids.device)
    with packed.attention():
        return _call_trunk(
            trunk,
            sequences.ids[line][None],
            None if lower is None else lower[line][None],
            sequences.lower_layers,
            position_ids=layout.columns[None],
            attention_mask=unused,
            **{KEYWORD: packed},
        )


@torch.no_grad()
def can_pack_prompts(trunk: PreTrainedModel, longest_row: int) -> bool:
    """Tell whether this trunk gives packed rows the states that it gives them alone.

    Not those whose tokens depend on their neighbours by more than transformers' `sdpa` attention
    and their position: ALiBi, recurrent layers, windows shorter than the longest row.
    """
    if not attends_to_whole_rows(trunk, longest_row):
        return False
    ids = torch.tensor([[0, 1, 2, 1, 2, 0], [0, 1, 2, 0, 1, 0]], device=trunk.device)
    prompts, responses = [3, 3], [3, 2]
    layout = pack([[0, 1]], prompt_lengths=prompts, response_lengths=responses).to(ids.device)
    rows = Sequences(ids, torch.tensor(prompts), torch.tensor(responses))
    try:
        found = packed_states(trunk, rows, PackedPrompts(layout, trunk.config))[0]
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError):
        return False  # an architecture that refuses positions, or such a mask
    alone = all_states(trunk, ids)[layout.rows, layout.columns]
    rounding = 0.05 if compute_type(trunk) == torch.bfloat16 else 1e-3
    return bool((found - alone).abs().max() <= rounding * alone.abs().max())


def attends_to_whole_rows(model: PreTrainedModel, longest_row: int) -> bool:
    """Tell from a model's config alone whether its attention reaches over a whole row."""
    config = model.config
    reaches = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    reach = min((reach for reach in reaches if reach is not None), default=longest_row)
    return config._attn_implementation == "sdpa" and reach >= longest_row


@torch.no_grad()
def logits_come_from_head(model: PreTrainedModel) -> bool:
    """Tell whether the model's logits are its output head over its states, and nothing more."""
    ids = torch.tensor([[0, 1, 2]], device=model.device)
    states = trunk(model)(input_ids=ids, use_cache=False).last_hidden_state
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.allclose(output_head(model)(states), logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def logits_are_of_head(model: PreTrainedModel) -> bool:
    """Tell the same without the model's weights: states and head are made up.

    False also where the model cannot be run with another trunk and head than its own.
    """
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 3, model.config.hidden_size, generator=generator)
    head = nn.Linear(model.config.hidden_size, 5, bias=False)
    head.weight.normal_(generator=generator)  # logits large enough to be capped
    own = getattr(model, model.base_model_prefix), output_head(model)
    try:
        setattr(model, model.base_model_prefix, _Given(states))
        model.set_output_embeddings(head)
        logits = model(input_ids=torch.tensor([[0, 1, 2]]), use_cache=False).logits
        return torch.allclose(head(states), logits, rtol=1e-3, atol=1e-3)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    finally:
        setattr(model, model.base_model_prefix, own[0])
        model.set_output_embeddings(own[1])


class _Given(nn.Module):
    """Stands for a trunk whose states are known, whatever goes in."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, *args: object, **kwargs: object) -> BaseModelOutputWithPastAndCrossAttentions:
        """Return the states."""
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=cast(Any, self.states))


def recompute_in_backward(model: PreTrainedModel) -> None:
    """Let forwards with gradients store one state per layer from now on, and recompute the rest."""
    cast(Any, model).gradient_checkpointing_enable({"use_reentrant": False})
    for layer in _layers(model):
        cast(Any, layer)._gradient_checkpointing_func = _checkpointed


def _layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def _checkpointed(function: partial, *states: object) -> object:
    """Run a layer as transformers does, but not in training mode.

    OPT and Falcon apply dropout by the mode of the layer itself.
    """
    layer = cast(Any, function.func).__self__
    packed: PackedPrompts | None = function.keywords.get(KEYWORD)

    def run(*states: object) -> object:
        before, layer.training = layer.training, False
        try:
            with packed.attention() if packed is not None else nullcontext():
                return function(*states)
        finally:
            layer.training = before

    return checkpoint(run, *states, use_reentrant=False)


@contextmanager
def _recomputing(trunk: nn.Module) -> Iterator[None]:
    """Let layers recompute, without dropout.

    transformers recomputes in training mode only, which would turn dropout on. So the layers, but
    not the modules in them, are set to training mode where gradients are enabled, until they run
    (see `_checkpointed`).
    """
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
    """Write right-padded prompts into the cache, each computed once and copied to its slots.

    Return the state after the last token of each.
    """
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
    """Add tokens to rows that are in the cache; return the state after the last of each."""
    positions, allowed = cache.extend_rows(slots, lengths, ids.shape[1])
    mask = torch.zeros(allowed.shape, dtype=cache.float_type, device=ids.device)
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
    """Let a single new token per row attend without copying the keys for each query head."""
    config = cast(Any, trunk).config
    usual = config._attn_implementation
    if usual == "sdpa":
        config._attn_implementation = CACHED
    try:
        yield
    finally:
        config._attn_implementation = usual


def cached_attention(
    module: nn.Module,
    query: Float[Tensor, "rows heads length width"],
    key: Float[Tensor, "rows groups columns width"],
    value: Float[Tensor, "rows groups columns width"],
    attention_mask: Float[Tensor, "rows 1 length columns"] | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **ignored: object,
) -> tuple[Float[Tensor, "rows length heads width"], None]:
    """Attend to a cache's keys; without a mask, to the earlier tokens among the new ones.

    A single new token's query heads attend as if they were tokens where they share keys, as they
    do so under the same mask.
    """
    rows, heads, length, width = query.shape
    groups = key.shape[1]
    if attention_mask is not None and sliding_window is not None and key.shape[2] > sliding_window:
        attention_mask = _within(sliding_window, attention_mask)
    if length == 1:
        query = query.reshape(rows, groups, heads // groups, width)
        if attention_mask is not None and key.device.type == "cpu":
            found = _attention_by_products(query, key, value, attention_mask, scaling)
            return found.view(rows, 1, heads, -1), None
    elif groups < heads:
        key = key.repeat_interleave(heads // groups, dim=1)
        value = value.repeat_interleave(heads // groups, dim=1)
    causal = attention_mask is None and length > 1
    found = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, is_causal=causal
    )
    return found.reshape(rows, heads, length, -1).transpose(1, 2), None


def _attention_by_products(
    query: Float[Tensor, "rows groups length width"],
    key: Float[Tensor, "rows groups columns width"],
    value: Float[Tensor, "rows groups columns width"],
    mask: Float[Tensor, "rows 1 1 columns"],
    scaling: float | None,
) -> Float[Tensor, "pairs length width"]:
    """Attend by two batches of products, which for a few queries each takes half as long on a CPU.

    A pair is a row and a group of heads.
    """
    query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    mask = mask.expand(-1, len(key) // len(mask), -1, -1).flatten(0, 1)
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.baddbmm(mask, query, key.transpose(1, 2), alpha=scale)
    return torch.bmm(torch.softmax(scores, dim=-1), value)


def _within(
    window: int, mask: Float[Tensor, "rows 1 length columns"]
) -> Float[Tensor, "rows 1 length columns"]:
    """Restrict a mask to the last `window` columns that each token may attend to."""
    last = (mask == 0).sum(dim=-1, keepdim=True) - 1
    columns = torch.arange(mask.shape[-1], device=mask.device)
    return mask.masked_fill(columns <= last - window, -torch.inf)


CACHED = "tether_cached"
AttentionInterface.register(CACHED, cached_attention)


MicrobatchFunction = Callable[[Sequences, Bool[Tensor, "rows response"]], tuple[Tensor, ...]]


@torch.no_grad()
def map_microbatches(
    sequences: Sequences,
    mask: Bool[Tensor, "rows response"],
    width: int,
    max_tokens: int,
    read: MicrobatchFunction,
) -> tuple[Tensor, ...]:
    """Apply `read` to microbatches without gradients; return its results for the rows, in order.

    `read` takes a microbatch and its mask, on the CPU, and returns tensors of shape (rows,), (rows,
    columns) or (rows, columns, ...); the latter are padded with 0 to `width` columns. All processes
    call it together: each computes about as many tokens as the others, also of others' rows.
    """
    whole: tuple[Tensor, ...] = ()
    loan = lend(sequences, max_tokens)
    borrowed = loan.out(MaskedRows(sequences, mask.cpu()))
    room = max(width, borrowed.sequences.ids.shape[1]) if world().replicas > 1 else width
    try:
        for part in loan.microbatches:
            own = borrowed.select(part.rows)
            found = read(own.sequences, own.mask)
            if not whole:
                count = len(borrowed.sequences.ids)
                whole = tuple(blank_rows(count, room, piece) for piece in found)
            if part.idle:
                continue
            for all_rows, piece in zip(whole, found, strict=True):
                rows = to_device(part.rows, piece.device)
                place = (rows,) if piece.ndim == 1 else (rows, slice(piece.shape[1]))
                all_rows[place] = piece
    finally:
        release_gathered()
    return loan.back(whole, width)
