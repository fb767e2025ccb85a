"""FSDP2: every process holds a shard of every weight, and gathers a layer's for its pass.

What lies outside the layers (embedding, last norm, heads) is gathered when the trunk is called and
stays until the backward pass is over, as heads read it after the trunk. Gradients are added up over
the replicas, each process keeping its part of the sum.
"""

import copy
from typing import cast
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

from tether.dist.dtensor import full_tensor
from tether.dist.tensor_parallel import share_layers
from tether.dist.world import world

_roots: WeakSet[FSDPModule] = WeakSet()
_plain: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def shard(
    root: nn.Module,
    trunk: nn.Module | None = None,
    called: nn.Module | None = None,
    keep_whole: bool = False,
    computed_in: torch.dtype | None = None,
) -> None:
    """Shard the weights of `root`; on one process do nothing.

    `trunk` has the layers. `called` is what is called for a pass, the root if nothing else: where
    it is the trunk, its caller may read other weights of the root afterwards. With `keep_whole`
    there is a plain model beside it, which `unsharded_model` brings up to date.

    Where products are computed in another format than weights are stored in, `computed_in`, layers
    are gathered in it and their gradients summed in float32. What lies outside the layers is
    gathered as it is stored: heads multiply in float32.
    """
    mesh = world().mesh
    if mesh is None:
        return
    plain = copy.deepcopy(root, {id(w): w for w in root.parameters()}) if keep_whole else None
    if trunk is not None:
        share_layers(cast(PreTrainedModel, trunk))
    layers = [m for m in root.modules() if isinstance(m, GradientCheckpointingLayer)]
    mixed = MixedPrecisionPolicy(computed_in, torch.float32, cast_forward_inputs=False)
    for module in (*reversed(layers), root):
        inside = module is not root
        policy = mixed if inside and computed_in is not None else MixedPrecisionPolicy()
        sharded = fully_shard(
            module, mesh=mesh["data"], reshard_after_forward=inside, mp_policy=policy
        )
        sharded.set_gradient_divide_factor(1.0)  # a sum, not a mean
        sharded.set_force_sum_reduction_for_comms(True)
    if called not in (None, root):
        _call_through(root, called)
    _roots.add(_set_up(root))
    if plain is not None:
        _plain[root] = plain.requires_grad_(False)  # over the weights as they were before


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
        if weight.requires_grad:  # the others have never moved
            weights[name].copy_(full_tensor(weight))
    return plain


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
