"""FSDP2: every process holds a shard of every weight, and gathers a layer's for its pass.

A unit is gathered for its own pass: every layer, the embedding, the output head. What else lies
outside the layers (last norm, small heads, an embedding that is the head as well) is gathered when
the trunk is called and stays until the backward pass is over, as it is read after the trunk.
Gradients are added up over the replicas, each process keeping its part of the sum: once per step
(`until_synced`), so that they are whole until then, or after every microbatch.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tether.dist.dtensor import full_tensor, local_shard
from tether.dist.tensor_parallel import share_layers
from tether.dist.world import world

T = TypeVar("T")

_roots: WeakSet[FSDPModule] = WeakSet()
_synced_by_step: WeakSet[FSDPModule] = WeakSet()  # those whose gradients wait for the last pass
_plain: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def shard(
    root: nn.Module,
    trunk: nn.Module | None = None,
    called: nn.Module | None = None,
    keep_whole: bool = False,
    computed_in: torch.dtype | None = None,
    fill: Callable[[nn.Module], None] | None = None,
    sync_by_step: bool = True,
) -> None:
    """Shard the weights of `root`; on one process do nothing.

    `trunk` has the layers. `called` is what is called for a pass, the root if nothing else: where
    it is the trunk, its caller may read other weights of the root afterwards. With `keep_whole`
    there is a plain model beside it, which `unsharded_model` brings up to date; it takes no memory
    before. `fill` gives shards on `meta` their numbers.

    Where products are computed in another format than weights are stored in, `computed_in`, layers
    are gathered in it and their gradients summed in float32. What lies outside the layers is
    gathered as it is stored: heads multiply in float32.

    With `sync_by_step` gradients are summed as `until_synced` says, else in every backward pass.
    """
    mesh = world().mesh
    if mesh is None:
        return
    plain = _outline(root) if keep_whole else None
    if trunk is not None:
        share_layers(cast(PreTrainedModel, trunk))
    layers = [m for m in root.modules() if isinstance(m, GradientCheckpointingLayer)]
    mixed = MixedPrecisionPolicy(computed_in, torch.float32, cast_forward_inputs=False)
    for module in (*reversed(layers), *outer_modules(root, trunk), root):
        policy = mixed if module in layers and computed_in is not None else MixedPrecisionPolicy()
        sharded = fully_shard(
            module, mesh=mesh["data"], reshard_after_forward=module is not root, mp_policy=policy
        )
        sharded.set_gradient_divide_factor(1.0)  # a sum, not a mean
        sharded.set_force_sum_reduction_for_comms(True)
    if called not in (None, root):
        _call_through(root, called)
    head = output_head_of(root)
    if isinstance(head, FSDPModule):
        vars(head)["run"] = lambda function, *arguments: function(head, *arguments)
        register_fsdp_forward_method(head, "run")
    if fill is not None:
        fill(root)
    _roots.add(sharded := _set_up(root))
    if sync_by_step:
        _synced_by_step.add(sharded)
    if plain is not None:
        _plain[root] = plain


def run_head(head: nn.Module, function: Callable[..., T], *arguments: object) -> T:
    """Return `function(head, *arguments)`, with the head gathered if it is a unit of its own.

    Tensors that gradients flow through must be among the arguments.
    """
    if not isinstance(head, FSDPModule):
        return function(head, *arguments)
    return vars(head)["run"](function, *arguments)


def until_synced(microbatches: Iterable[T]) -> Iterator[T]:
    """Yield the microbatches of a step; the backward pass of the last one sums the gradients over
    the replicas. Every process must have as many.
    """
    rest = iter(microbatches)
    here = next(rest, None)
    try:
        while here is not None:
            following = next(rest, None)
            _sync_gradients(following is None)
            yield here
            here = following
    finally:
        _sync_gradients(True)


def _sync_gradients(on: bool) -> None:
    for root in _synced_by_step:
        root.set_requires_gradient_sync(on)


def outer_modules(root: nn.Module, trunk: nn.Module | None) -> list[nn.Module]:
    """Return embedding and output head, where each has weights of its own."""
    embedding = trunk.get_input_embeddings() if isinstance(trunk, PreTrainedModel) else None
    found = [m for m in (embedding, output_head_of(root)) if isinstance(m, nn.Module)]
    weights = [{id(weight) for weight in module.parameters()} for module in found]
    if not all(weights) or (len(found) == 2 and weights[0] & weights[1]):
        return []
    return found


def output_head_of(root: nn.Module) -> nn.Module | None:
    """Return a language model's output head."""
    return root.get_output_embeddings() if isinstance(root, PreTrainedModel) else None


@torch.no_grad()
def unsharded_model(model: nn.Module) -> nn.Module:
    """Return a plain model with the full weights of now; a model that is not sharded is itself.

    Every process must call this.
    """
    plain = _plain.get(model)
    if plain is None:
        return model
    release_gathered()
    weights = dict(plain.named_parameters())
    for name, weight in model.named_parameters():
        own = weights[name]
        if own.is_meta:  # the first time
            filled = torch.empty_like(own, device=local_shard(weight).device)
            torch.utils.swap_tensors(own, nn.Parameter(filled, requires_grad=False))
        elif not weight.requires_grad:
            continue  # it has never moved
        own.copy_(full_tensor(weight))
    return plain


def with_outer_weights(root: nn.Module, compute: Callable[[], T]) -> T:
    """Return what `compute` returns, which may call a part of `root`, such as its trunk.

    What lies outside the layers is gathered meanwhile. Every process must call this.
    """
    if root not in _roots:
        return compute()
    vars(root)["compute"] = compute
    register_fsdp_forward_method(root, "compute")
    try:
        return vars(root)["compute"]()
    finally:
        del vars(root)["compute"]
        release_gathered()


def _outline(root: nn.Module) -> nn.Module:
    """Return a frozen copy whose weights have no numbers yet."""
    weights = {
        id(w): nn.Parameter(torch.empty_like(w, device="meta"), requires_grad=False)
        for w in root.parameters()
    }
    return copy.deepcopy(root, cast(dict[int, object], weights))


def release_gathered() -> None:
    """Free what a pass without gradients has gathered: no backward pass will."""
    for root in _roots:
        root.reset_iter_state()


def _call_through(root: nn.Module, trunk: nn.Module) -> None:
    """Make a call of the trunk alone count as one of the root."""
    vars(root)["call_trunk"] = trunk.forward
    register_fsdp_forward_method(root, "call_trunk")
    trunk.forward = vars(root)["call_trunk"]


def _set_up(root: nn.Module) -> FSDPModule:
    """Run an empty pass, in which FSDP sets itself up.

    So a model that does not fit is noticed before anything has run, and `release_gathered` may be
    called at any time.
    """
    vars(root)["read_nothing"] = lambda: None
    register_fsdp_forward_method(root, "read_nothing")
    vars(root)["read_nothing"]()
    sharded = cast(FSDPModule, root)
    sharded.reset_iter_state()
    return sharded
