"""Collectives over all processes: sum, gather, agree. On one process each is the identity."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from tether.dist.liveness import naming_lost_processes
from tether.dist.wire import pack, unpack
from tether.dist.world import waiting_group, world

T = TypeVar("T")
_seconds = [0.0]


@contextmanager
def _meeting() -> Iterator[None]:
    """Name the processes that do not answer, and count the seconds."""
    began = time.perf_counter()
    try:
        with naming_lost_processes():
            yield
    finally:
        _seconds[0] += time.perf_counter() - began


def seconds_in_collectives() -> float:
    """Return how long this process has been in the functions of this file: sending, and waiting for
    the others. What FSDP and NCCL do beside the host is not in it."""
    return _seconds[0]


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all replicas."""
    here = world()
    if here.replicas == 1:
        return tensor
    with _meeting():
        tensor = tensor.clone()
        torch_dist.all_reduce(tensor, group=here.shared_mesh["data"].get_group())
    return tensor


def all_reduce_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum gradients over all replicas in place; FSDP has done so for those that it shards."""
    here = world()
    if here.replicas == 1:
        return
    plain = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain]
    if not gradients:
        return
    flat = all_reduce_sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for parameter, piece in zip(plain, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


def gather(mine: T) -> list[T]:
    """Return every process's value, in the order of ranks."""
    here = world()
    if here.size == 1:
        return [mine]
    with _meeting():
        return [unpack(content) for content in _gather_bytes(pack(mine), here.size)]


def gather_results(compute: Callable[[], T]) -> list[T]:
    """Return what each process computes; if one fails, all raise its error."""
    if world().size == 1:
        return [compute()]
    found = gather(_attempt(compute))
    for _, error in found:
        if error is not None:
            raise error
    return [cast(T, result) for result, _ in found]


def on_first_process(compute: Callable[[], T]) -> T:
    """Return what rank 0 computes, on every process; if it fails, all raise its error."""
    here = world()
    if here.size == 1:
        return compute()
    said = _attempt(compute) if here.is_first else None
    with _meeting():
        result, error = unpack(_broadcast_bytes(pack(said) if here.is_first else None))
    if error is not None:
        raise error
    return result


def any_process(flag: bool) -> bool:
    """Return whether the flag is set on any process."""
    return any(gather(flag))


def _gather_bytes(mine: Tensor, size: int) -> list[Tensor]:
    lengths, group = [torch.zeros(1, dtype=torch.int64) for _ in range(size)], waiting_group()
    torch_dist.all_gather(lengths, torch.tensor([len(mine)]), group)
    longest = max(int(length) for length in lengths)
    padded = mine if len(mine) == longest else pad(mine, (0, longest - len(mine)))
    found = [torch.empty_like(padded) for _ in range(size)]
    torch_dist.all_gather(found, padded, group)
    return [content[: int(length)] for content, length in zip(found, lengths, strict=True)]


def _broadcast_bytes(said: Tensor | None) -> Tensor:
    """Return the bytes of rank 0; the other processes have none to give."""
    length = torch.tensor([0 if said is None else len(said)])
    group = waiting_group()
    torch_dist.broadcast(length, src=0, group=group)
    content = torch.zeros(int(length), dtype=torch.uint8) if said is None else said
    torch_dist.broadcast(content, src=0, group=group)
    return content


def _attempt(compute: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return compute(), None
    except Exception as error:
        return None, error
