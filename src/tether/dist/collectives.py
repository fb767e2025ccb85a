"""Collectives over all processes: sum, gather, agree. On one process each is the identity."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def gather_replicas(mine: T) -> list[T]:
    """Return the value of each copy of the model, in their order; those who share one have the
    same."""
    return gather(mine)[:: world().sharing]


def exchange(parts: Sequence[T]) -> list[T]:
    """Give each process its part; return what each of them gives this one, in the order of ranks.
    This one's own is not copied."""
    here = world()
    if here.size == 1:
        return [*parts]
    with _meeting():
        sent = [pack(None if rank == here.rank else part) for rank, part in enumerate(parts)]
        group, lengths = waiting_group(), torch.tensor([*map(len, sent)])
        coming = torch.empty_like(lengths)
        torch_dist.all_to_all_single(coming, lengths, group=group)
        sizes = coming.tolist()
        content = torch.cat(sent)
        del sent
        found = torch.empty(sum(sizes), dtype=torch.uint8)
        torch_dist.all_to_all_single(found, content, sizes, lengths.tolist(), group=group)
    given = [unpack(content) for content in found.split(sizes)]
    return [*given[: here.rank], parts[here.rank], *given[here.rank + 1 :]]


def exchange_replicas(parts: Sequence[T]) -> list[T]:
    """Give each copy of the model its part; return what each gives this one. Processes that share
    one each deal with the one that has their own place in the other."""
    here = world()
    place = here.rank % here.sharing
    to_all: list[T | None] = [None] * here.size
    to_all[place :: here.sharing] = parts
    return cast(list[T], exchange(to_all)[place :: here.sharing])


def gather_sharing(mine: T) -> list[T]:
    """Return the values of the processes that share this one's copy of the model."""
    here = world()
    if here.sharing == 1:
        return [mine]
    first = here.replica * here.sharing
    sharing = range(first, first + here.sharing)
    found = exchange([mine if rank in sharing else None for rank in range(here.size)])
    return cast(list[T], found[first : first + here.sharing])


def all_or_error(compute: Callable[[], T]) -> T:
    """Return what this process computes; if one fails, all raise its error."""
    if world().size == 1:
        return compute()
    result, mine = _attempt(compute)
    for error in gather(mine):
        if error is not None:
            raise error
    return cast(T, result)


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
