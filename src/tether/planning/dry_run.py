"""Peak memory of forward and backward passes, found by a dry run on `meta` tensors.

These have shapes but no numbers, so a model of any size fits.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PreTrainedModel

from tether.data.shared_prompts import PackedLayout, pack
from tether.models.forward import all_states, packed_states
from tether.models.precision import operand, planning_for
from tether.models.prompt_attention import PackedPrompts
from tether.models.token_log_probs import FusedLogProbs, Head, max_cached_cells
from tether.support.memory import allocated_bytes
from tether.types import Sequences


@dataclass(frozen=True)
class Batch:
    """A microbatch whose rows all have the greatest length."""

    rows: int
    length: int
    response: int
    prompts: int | None = None  # that are computed once each, where the rows are packed

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch, padding included."""
        prompts = self.rows if self.prompts is None else self.prompts
        return prompts * (self.length - self.response) + self.rows * self.response

    @property
    def text(self) -> str:
        """The batch in words."""
        rows = f"{self.rows} rows of {self.length} tokens"
        return rows if self.prompts is None else f"{rows}, {self.prompts} prompts"


@dataclass(frozen=True)
class HeadedTrunk:
    """A trunk with the heads on it, a policy's, a value head, or both, and a kind of device."""

    trunk: PreTrainedModel
    device: str
    policy: Head | None = None
    value: nn.Linear | None = None
    lower_layers: int = 0  # whose states are given

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all parts."""
        for module in (self.trunk, self.policy, self.value):
            if module is not None:
                yield from module.parameters()


def forward_peak(model: HeadedTrunk, batch: Batch) -> int:
    """Return the peak bytes beside the weights of a forward pass without gradients."""
    with torch.no_grad(), _counting(model) as alive:
        _forward(model, batch)
    return alive.peak


def backward_peak(model: HeadedTrunk, batch: Batch, backwards: int, keep_gradients: bool) -> int:
    """Return the peak bytes beside the weights of so many backward passes before a step.

    With `keep_gradients` these are counted; without, each is freed as soon as it is complete.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    hooks = []
    if not keep_gradients:
        hooks = [w.register_post_accumulate_grad_hook(_drop_gradient) for w in weights]
    with _counting(model) as alive:
        for _ in range(min(backwards, 2)):  # all after the second are like it
            _forward(model, batch).backward()
    for hook in hooks:
        hook.remove()
    for weight in weights:
        weight.grad = None
    return alive.peak


def _drop_gradient(weight: Tensor) -> None:
    weight.grad = None


def _lower_states(model: HeadedTrunk, batch: Batch) -> Float[Tensor, "rows length width"] | None:
    """Return what a pass starts from where lower layers are frozen."""
    if not model.lower_layers:
        return None
    shape = (batch.rows, batch.length, model.trunk.config.hidden_size)
    return torch.zeros(shape, dtype=model.trunk.dtype)


def _forward(model: HeadedTrunk, batch: Batch) -> Float[Tensor, ""]:
    """Do what an update does with a microbatch, as far as it takes memory."""
    ids = torch.zeros(batch.rows, batch.length, dtype=torch.long)
    lengths = torch.zeros(batch.rows, dtype=torch.long)
    sequences = Sequences(ids, lengths, lengths, _lower_states(model, batch), model.lower_layers)
    if batch.prompts is None:
        hidden = all_states(model.trunk, ids, sequences.lower_states, model.lower_layers)
        source = torch.zeros(batch.rows, batch.response + 1, 1, dtype=torch.long)
        states = hidden.gather(1, source.expand(-1, -1, hidden.shape[2]))
    else:
        packed = PackedPrompts(_layout(batch).to("meta"), model.trunk.config)
        states = packed.states_before_tokens(packed_states(model.trunk, sequences, packed))
    found = torch.zeros(())
    if model.value is not None:
        found = found + model.value(states).sum()
    if model.policy is not None:
        found = found + _log_probs(model.policy, states[:, :-1].flatten(0, 1)).sum()
    return found


def _layout(batch: Batch) -> PackedLayout:
    """Give every prompt about as many of the rows."""
    assert batch.prompts is not None
    groups = [list(range(batch.rows))[start :: batch.prompts] for start in range(batch.prompts)]
    prompt = batch.length - batch.response
    return pack(groups, [prompt] * batch.rows, [batch.response] * batch.rows)


def _log_probs(head: Head, states: Float[Tensor, "cells width"]) -> Float[Tensor, " cells"]:
    chunks = operand(head, states).split(max_cached_cells(head))
    parts = []
    for chunk in chunks:
        ids = torch.zeros(len(chunk), dtype=torch.long)
        cached = len(chunks) == 1
        log_probs, _ = FusedLogProbs.apply(chunk, head.weight, head.bias, ids, 1.0, cached)
        parts.append(log_probs)
    return torch.cat(parts)


class _AliveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are created inside and not freed yet."""

    def __init__(self, known: Iterator[Tensor], device: str) -> None:
        super().__init__()
        self.device = device
        self.now = self.peak = 0
        self.seen = WeakIdKeyDictionary()
        for tensor in known:
            self.seen[tensor.untyped_storage()] = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self.seen:
            return
        size = allocated_bytes(storage.nbytes(), self.device)
        self.seen[storage] = None
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


@contextmanager
def _counting(model: HeadedTrunk) -> Iterator[_AliveBytes]:
    """Create tensors without numbers and count them meanwhile.

    Attention stores what a fused kernel stores: torch has only the unfused one for `meta` tensors.
    """
    config = model.trunk.config
    usual = config._attn_implementation
    if usual == "sdpa":
        config._attn_implementation = FUSED
    try:
        alive = _AliveBytes(model.parameters(), model.device)
        with torch.device("meta"), planning_for(model.device), alive:
            yield alive
    finally:
        config._attn_implementation = usual


def _fused_attention(
    module: nn.Module,
    query: Float[Tensor, "rows heads length width"],
    key: Float[Tensor, "rows groups length width"],
    value: Float[Tensor, "rows groups length width"],
    attention_mask: Tensor | None,
    packed_prompts: PackedPrompts | None = None,
    **ignored: object,
) -> tuple[Float[Tensor, "rows length heads width"], None]:
    if packed_prompts is not None:
        return packed_prompts.attend(query, key, value, None, _fused), None
    return _fused(query, key, value, None, None).transpose(1, 2).contiguous(), None


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found, _ = fused(query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale)
    return found


FUSED = "tether_dry_run"
AttentionInterface.register(FUSED, _fused_attention)
