"""Sharded tensors: this process's shard, and the full tensor out of all shards.

A weight may be sharded twice: by tensor parallelism, over rows or columns, and each of these shards
by FSDP over the replicas, over rows. A plain tensor is its own shard and full tensor.
"""

import math
from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tether.dist.world import world


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's shard, as a plain tensor over the same memory."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return the local shard as a parameter that any optimizer takes."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(local_shard(parameter), requires_grad=parameter.requires_grad)


def as_dtensor(part: Tensor, like: Tensor) -> Tensor:
    """Return a local shard, such as of Adam's moments, as a DTensor placed as `like` is."""
    if not isinstance(like, DTensor) or part.shape != local_shard(like).shape:
        return part
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Gather the full tensor. Every process must call this for the same tensors in order."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh, cut = world().shared_mesh, _cut_in_layer(tensor)
    shape = _shape_in_layer(tensor.shape, cut, mesh["tensor"].size())
    rows = _join(local_shard(tensor), mesh["data"], Shard(0), shape)
    return rows if cut is None else _join(rows, mesh["tensor"], cut, tensor.shape)


@torch.no_grad()
def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of a full tensor, placed as `like` is. Nothing is sent."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    mesh, cut = world().shared_mesh, _cut_in_layer(like)
    if cut is not None:
        whole = distribute_tensor(whole, mesh["tensor"], [cut], src_data_rank=None).to_local()
    part = distribute_tensor(whole, mesh["data"], [Shard(0)], src_data_rank=None).to_local()
    return part.clone()  # so that the full tensor can be freed


def own_slices(like: Tensor) -> tuple[slice, ...]:
    """Return where in the full tensor the shard lies that this process has of `like`."""
    spans = [(0, size) for size in like.shape]
    if isinstance(like, DTensor):
        mesh, cut = world().shared_mesh, _cut_in_layer(like)
        if isinstance(cut, Shard):
            spans[cut.dim] = _own_span(spans[cut.dim], mesh["tensor"])
        spans[0] = _own_span(spans[0], mesh["data"])
    return tuple(slice(begin, end) for begin, end in spans)


@torch.no_grad()
def copy_from_full(weight: Tensor, whole: Tensor) -> None:
    """Copy a full tensor into a weight, sharded or not."""
    if whole.shape != weight.shape:
        raise RuntimeError(
            f"a weight is {tuple(weight.shape)}, what was saved {tuple(whole.shape)}"
        )
    local_shard(weight).copy_(shard_like(whole, weight))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients together, each full gradient counted once."""
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(_cut_over(parameter), []).append(local_shard(parameter.grad))
    if groups.keys() <= {()}:
        return nn.utils.get_total_norm(groups.get((), []))
    norms = {cut: nn.utils.get_total_norm(gradients) for cut, gradients in groups.items()}
    squares = []
    for dimensions, norm in norms.items():
        square = norm.double() ** 2
        for dimension in dimensions:
            torch_dist.all_reduce(square, group=world().shared_mesh[dimension].get_group())
        squares.append(square)
    [*_, last] = norms.values()
    return torch.stack(squares).sum().sqrt().to(last.dtype)


def _cut_in_layer(tensor: DTensor) -> Placement | None:
    """Return the placement over the tensor-parallel processes, if there are any."""
    return tensor.placements[1] if len(tensor.placements) == 2 else None


def _cut_over(parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the dimensions of the mesh over which the parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    cut = _cut_in_layer(parameter)
    return ("data",) if cut is None or isinstance(cut, Replicate) else ("data", "tensor")


def _own_span(span: tuple[int, int], mesh: DeviceMesh) -> tuple[int, int]:
    """Return this process's share of a range, cut as `Tensor.chunk` cuts it."""
    begin, end = span
    share = math.ceil((end - begin) / mesh.size())
    first = begin + mesh.get_local_rank() * share
    return min(first, end), min(first + share, end)


def _shape_in_layer(shape: torch.Size, cut: Placement | None, size: int) -> torch.Size:
    """Return the shape of a tensor-parallel shard, over all replicas."""
    if not isinstance(cut, Shard):
        return shape
    return torch.Size(n // size if d == cut.dim else n for d, n in enumerate(shape))


def _join(part: Tensor, mesh: DeviceMesh, cut: Placement, shape: torch.Size) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    parts = DTensor.from_local(part, mesh, [cut], run_check=False, shape=shape, stride=stride)
    return parts.full_tensor()
