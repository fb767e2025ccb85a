"""Who else runs this loop: nobody, or the processes that torchrun or Ray started."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tether.dist.environment import launched_size, local_rank


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int = 0
    size: int = 1
    timeout: timedelta = timedelta(minutes=10)
    mesh: DeviceMesh | None = None  # data x tensor
    roll: torch_dist.ProcessGroup | None = None  # only for asking who still answers

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def replicas(self) -> int:
        """Copies of the model: processes that train on rows of their own."""
        return self.size if self.mesh is None else self.mesh["data"].size()

    @property
    def replica(self) -> int:
        return self.rank if self.mesh is None else self.mesh["data"].get_local_rank()


ALONE = World()
_now = ALONE


def world() -> World:
    return _now


def local_device(kind: str) -> torch.device:
    """This process's own device of a kind: processes of a machine share its GPUs out."""
    if kind != "cuda":
        return torch.device(kind)
    return torch.device("cuda", local_rank())


@contextmanager
def entered(device: str, tensor_parallel: int, timeout_seconds: float) -> Iterator[World]:
    """As one of the processes that a launcher started; alone, this does nothing."""
    global _now
    if launched_size() == 1:
        yield ALONE
        return
    timeout = timedelta(seconds=timeout_seconds)
    began_here = not torch_dist.is_initialized()  # Ray has begun it already
    if began_here:
        # Objects travel between CPUs whatever the tensors do.
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        torch_dist.init_process_group(backend, timeout=timeout)
    size = torch_dist.get_world_size()
    mesh = init_device_mesh(
        device, (size // tensor_parallel, tensor_parallel), mesh_dim_names=("data", "tensor")
    )
    roll = torch_dist.new_group(backend="gloo", timeout=timeout)
    _now = World(torch_dist.get_rank(), size, timeout, mesh, roll)
    try:
        yield _now
    finally:
        _now = ALONE
        if began_here:
            torch_dist.destroy_process_group()
