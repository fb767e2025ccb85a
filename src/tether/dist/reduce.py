"""What the processes do together: add up, gather, agree. Alone, each of these is the identity."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tether.dist.roll import waiting
from tether.dist.world import world

T = TypeVar("T")


def total(tensor: Tensor) -> Tensor:
    """The sum over all replicas of a tensor that each has a part of."""
    here = world()
    if here.replicas == 1:
        return tensor
    with waiting():
        tensor = tensor.clone()
        torch_dist.all_reduce(tensor, group=here.mesh["data"].get_group())
    return tensor


def total_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Every replica's gradients become their sum; FSDP has done so for those that it shards."""
    here = world()
    if here.replicas == 1:
        return
    whole = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in whole]
    if not gradients:
        return
    flat = total(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for parameter, piece in zip(whole, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


def gather(mine: T) -> list[T]:
    """Everyone's, in the order of the processes."""
    here = world()
    if here.size == 1:
        return [mine]
    found: list[T | None] = [None] * here.size
    with waiting():
        torch_dist.all_gather_object(found, mine)
    return found


def gather_results(compute: Callable[[], T]) -> list[T]:
    """What each process computes, for all; if one fails, all fail with its error."""
    if world().size == 1:
        return [compute()]
    found = gather(_attempt(compute))
    for _, error in found:
        if error is not None:
            raise error
    return [result for result, _ in found]


def from_first(compute: Callable[[], T]) -> T:
    """What the first process computes, for all; if it fails, all fail with its error."""
    here = world()
    if here.size == 1:
        return compute()
    said = [_attempt(compute) if here.is_first else None]
    with waiting():
        torch_dist.broadcast_object_list(said)
    result, error = said[0]
    if error is not None:
        raise error
    return result


def anyone(flag: bool) -> bool:
    """Whether it is so for one process at least."""
    return any(gather(flag))


def _attempt(compute: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return compute(), None
    except Exception as error:
        return None, error
