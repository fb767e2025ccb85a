"""What a network keeps in memory while it reads or learns, found by letting it do so on `meta`
tensors: these have shapes and no numbers, so that any size of model fits anywhere."""

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
from transformers import AttentionInterface

from tether.models.forward import all_states
from tether.models.token_log_probs import FusedLogProbs, Head, max_cached_cells
from tether.support.memory import allocated_bytes


@dataclass(frozen=True)
class Batch:
    """A microbatch whose rows are all as long as rows can be."""

    rows: int
    length: int
    response: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class Reader:
    """A trunk and what reads its states, a policy's head, a value head, or both, on a device."""

    trunk: nn.Module
    device: str
    policy: Head | None = None
    value: nn.Linear | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        for module in (self.trunk, self.policy, self.value):
            if module is not None:
                yield from module.parameters()


def peak_of_reading(reader: Reader, batch: Batch) -> int:
    """Bytes beside the weights at the worst moment of a pass without gradients."""
    with torch.no_grad(), _rehearsal(reader) as alive:
        _read(reader, batch)
    return alive.peak


def peak_of_learning(reader: Reader, batch: Batch, backwards: int, keep: bool) -> int:
    """Bytes beside the weights at the worst moment of so many backward passes before a step.

    Gradients are among them if they are to `keep`; else each is gone as soon as it is whole.
    """
    weights = [weight for weight in reader.parameters() if weight.requires_grad]
    hooks = [] if keep else [w.register_post_accumulate_grad_hook(_forget) for w in weights]
    with _rehearsal(reader) as alive:
        for _ in range(min(backwards, 2)):  # from the second on, all are alike
            _read(reader, batch).backward()
    for hook in hooks:
        hook.remove()
    for weight in weights:
        weight.grad = None
    return alive.peak


def _forget(weight: nn.Parameter) -> None:
    weight.grad = None


def _read(reader: Reader, batch: Batch) -> Float[Tensor, ""]:
    """What an update does with a microbatch, as far as it takes memory: all rows are whole, and
    every response token counts."""
    ids = torch.zeros(batch.rows, batch.length, dtype=torch.long)
    hidden = all_states(reader.trunk, ids)
    source = torch.zeros(batch.rows, batch.response + 1, 1, dtype=torch.long)
    states = hidden.gather(1, source.expand(-1, -1, hidden.shape[2]))
    found = torch.zeros(())
    if reader.value is not None:
        found = found + reader.value(states).sum()
    if reader.policy is not None:
        found = found + _log_probs(reader.policy, states[:, :-1].flatten(0, 1)).sum()
    return found


def _log_probs(head: Head, states: Float[Tensor, "cells width"]) -> Float[Tensor, " cells"]:
    chunks = states.split(max_cached_cells(head))
    parts = []
    for chunk in chunks:
        ids = torch.zeros(len(chunk), dtype=torch.long)
        keep = len(chunks) == 1
        parts.append(FusedLogProbs.apply(chunk, head.weight, head.bias, ids, 1.0, keep)[0])
    return torch.cat(parts)


class _Alive(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside, until they are gone."""

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
def _rehearsal(reader: Reader) -> Iterator[_Alive]:
    """Inside, tensors have no numbers and are counted, and attention keeps what a fused kernel
    keeps; for `meta` tensors torch itself has only the plain one."""
    config = reader.trunk.config
    usual = config._attn_implementation
    if usual == "sdpa":
        config._attn_implementation = REHEARSED
    try:
        with torch.device("meta"), _Alive(reader.parameters(), reader.device) as alive:
            yield alive
    finally:
        config._attn_implementation = usual


def _rehearsed_attention(
    module: nn.Module,
    query: Float[Tensor, "rows heads length width"],
    key: Float[Tensor, "rows groups length width"],
    value: Float[Tensor, "rows groups length width"],
    attention_mask: None,
    **ignored: object,
) -> tuple[Float[Tensor, "rows length heads width"], None]:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found, _ = fused(query, key, value, 0.0, True)
    return found.transpose(1, 2).contiguous(), None


REHEARSED = "tether_rehearsed"
AttentionInterface.register(REHEARSED, _rehearsed_attention)
