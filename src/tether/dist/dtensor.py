"""Tensors that lie in parts over the processes: each one's own part, and the whole out of all.

A weight may be cut twice: over the processes that share its layer, by rows or by columns, and what
each of them has once more over the replicas, by rows. A plain tensor is its own part and whole.
"""

from collections.abc import Iterable

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tether.dist.world import world


def local_shard(tensor: Tensor) -> Tensor:
    """What this process holds of it, as a plain tensor over the same memory."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """The same as a parameter that any optimizer takes; a plain one is itself."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(local_shard(parameter), requires_grad=parameter.requires_grad)


def as_dtensor(part: Tensor, like: Tensor) -> Tensor:
    """A part that lies as this process's part of `like` does, such as of Adam's moments."""
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
    """The whole of it. Every process must ask for the same tensors in the same order."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh, cut = world().mesh, _cut_in_layer(tensor)
    shape = _shape_in_layer(tensor.shape, cut, mesh["tensor"].size())
    rows = _join(local_shard(tensor), mesh["data"], Shard(0), shape)
    return rows if cut is None else _join(rows, mesh["tensor"], cut, tensor.shape)


@torch.no_grad()
def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, cut as `like` is. Nothing is sent."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    mesh, cut = world().mesh, _cut_in_layer(like)
    if cut is not None:
        whole = distribute_tensor(whole, mesh["tensor"], [cut], src_data_rank=None).to_local()
    part = distribute_tensor(whole, mesh["data"], [Shard(0)], src_data_rank=None).to_local()
    return part.clone()  # the whole need not stay in memory for it


@torch.no_grad()
def copy_from_full(weight: Tensor, whole: Tensor) -> None:
    """Write a whole tensor into a weight, wherever its parts lie."""
    if whole.shape != weight.shape:
        raise RuntimeError(f"a weight is {tuple(weight.shape)}, what was saved {tuple(whole.shape)}")
    local_shard(weight).copy_(shard_like(whole, weight))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients together, each counted whole and once."""
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(_cut_over(parameter), []).append(local_shard(parameter.grad))
    if groups.keys() <= {()}:
        return nn.utils.get_total_norm(groups.get((), []))
    squares = []
    for dimensions, gradients in groups.items():
        norm = nn.utils.get_total_norm(gradients)
        square = norm.double() ** 2
        for dimension in dimensions:
            torch_dist.all_reduce(square, group=world().mesh[dimension].get_group())
        squares.append(square)
    return torch.stack(squares).sum().sqrt().to(norm.dtype)


def _cut_in_layer(tensor: DTensor) -> Placement | None:
    """How the processes that share a layer have cut it, if they do."""
    return tensor.placements[1] if len(tensor.placements) == 2 else None


def _cut_over(parameter: nn.Parameter) -> tuple[str, ...]:
    """The dimensions of the mesh along which the processes have different parts of it."""
    if not isinstance(parameter, DTensor):
        return ()
    cut = _cut_in_layer(parameter)
    return ("data",) if cut is None or isinstance(cut, Replicate) else ("data", "tensor")


def _shape_in_layer(shape: torch.Size, cut: Placement | None, size: int) -> torch.Size:
    """What a process of those that share a layer has of it, over all replicas."""
    if not isinstance(cut, Shard):
        return shape
    return torch.Size(n // size if d == cut.dim else n for d, n in enumerate(shape))


def _join(part: Tensor, mesh: DeviceMesh, cut: Placement, shape: torch.Size) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    parts = DTensor.from_local(part, mesh, [cut], run_check=False, shape=shape, stride=stride)
    return parts.full_tensor()
