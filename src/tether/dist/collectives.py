"""What the processes do together: add up, gather, agree. Alone, each of these is the identity."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tether.dist.liveness import naming_lost_processes
from tether.dist.wire import pack, unpack
from tether.dist.world import world

T = TypeVar("T")


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """The sum over all replicas of a tensor that each has a part of."""
    here = world()
    if here.replicas == 1:
        return tensor
    with naming_lost_processes():
        tensor = tensor.clone()
        torch_dist.all_reduce(tensor, group=here.mesh["data"].get_group())
    return tensor


def all_reduce_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Every replica's gradients become their sum; FSDP has done so for those that it shards."""
    here = world()
    if here.replicas == 1:
        return
    whole = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in whole]
    if not gradients:
        return
    flat = all_reduce_sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for parameter, piece in zip(whole, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


def gather(mine: T) -> list[T]:
    """Everyone's, in the order of the processes."""
    here = world()
    if here.size == 1:
        return [mine]
    with naming_lost_processes():
        return [unpack(content) for content in _gather_bytes(pack(mine), here.size)]


def gather_results(compute: Callable[[], T]) -> list[T]:
    """What each process computes, for all; if one fails, all fail with its error."""
    if world().size == 1:
        return [compute()]
    found = gather(_attempt(compute))
    for _, error in found:
        if error is not None:
            raise error
    return [result for result, _ in found]


def on_first_process(compute: Callable[[], T]) -> T:
    """What the first process computes, for all; if it fails, all fail with its error."""
    here = world()
    if here.size == 1:
        return compute()
    said = _attempt(compute) if here.is_first else None
    with naming_lost_processes():
        result, error = unpack(_broadcast_bytes(pack(said) if here.is_first else b""))
    if error is not None:
        raise error
    return result


def any_process(flag: bool) -> bool:
    """Whether it is so for one process at least."""
    return any(gather(flag))


def _gather_bytes(mine: bytes, size: int) -> list[bytes]:
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    torch_dist.all_gather(lengths, torch.tensor([len(mine)]))
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    found = [torch.empty_like(padded) for _ in range(size)]
    torch_dist.all_gather(found, padded)
    pairs = zip(found, lengths, strict=True)
    return [content[: int(length)].numpy().tobytes() for content, length in pairs]


def _broadcast_bytes(said: bytes) -> bytes:
    """What the first process says; what others give is not looked at."""
    length = torch.tensor([len(said)])
    torch_dist.broadcast(length, src=0)
    content = torch.zeros(int(length), dtype=torch.uint8)
    if said:
        content[:] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    torch_dist.broadcast(content, src=0)
    return content.numpy().tobytes()


def _attempt(compute: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return compute(), None
    except Exception as error:
        return None, error
