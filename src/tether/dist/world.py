"""This process among those that torchrun or Ray started; alone without them."""

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import cast

import torch
import torch.distributed as torch_dist
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh

from tether.dist.environment import launched_rank, launched_size, local_rank
from tether.errors import OthersLost, UserError, one_line

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOPBACK_INTERFACE = "lo"
USUAL_GPU_BYTES = 80 * 2**30

# What processes wait for each other under, by the field that bounds it.
START, USUAL = "start_timeout_seconds", "timeout_seconds"
REWARDS, SAVING = "reward_timeout_seconds", "save_timeout_seconds"


@dataclass(frozen=True)
class World:
    """This process's rank, and what it shares with the others."""

    rank: int = 0
    size: int = 1
    groups: Mapping[str, torch_dist.ProcessGroup] = field(default_factory=dict)  # by the wait
    limits: Mapping[str, float] = field(default_factory=dict)  # of these, in seconds
    mesh: DeviceMesh | None = None  # data x tensor
    store: Store | None = None  # for finding out which processes still answer
    gpu_bytes: int | None = None  # memory of the smallest GPU; None without GPUs

    @property
    def shared_mesh(self) -> DeviceMesh:
        """The mesh of several processes; asking for it on one alone is a mistake."""
        if self.mesh is None:
            raise RuntimeError("this process runs alone and has no mesh")
        return self.mesh

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def replicas(self) -> int:
        """Copies of the model: processes that train on rows of their own."""
        return self.size if self.mesh is None else self.mesh["data"].size()

    @property
    def sharing(self) -> int:
        """Processes that share the layers of one copy: neighbours, with the same rows."""
        return self.size // self.replicas

    @property
    def replica(self) -> int:
        """Which of the replicas this process belongs to."""
        return self.rank if self.mesh is None else self.mesh["data"].get_local_rank()


ALONE = World()
_now = ALONE
_waiting = USUAL


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Let processes wait for each other under the time-out of `what` meanwhile."""
    global _waiting
    before, _waiting = _waiting, what
    try:
        yield
    finally:
        _waiting = before


def waited_for() -> str:
    """Return the field whose time-out bounds the waiting now."""
    return _waiting


def waiting_group() -> torch_dist.ProcessGroup | None:
    """Return all processes, as a group whose collectives end by that time-out."""
    return _now.groups.get(_waiting)


def world() -> World:
    """Return this process's place among the others."""
    return _now


def local_device(kind: str) -> torch.device:
    """Return this process's own device of a kind: each process of a machine has its own GPU."""
    if kind != "cuda":
        return torch.device(kind)
    return torch.device("cuda", local_rank())


def gpu_bytes() -> int:
    """Return the memory of a GPU, of the smallest where there are several processes.

    Where there is none, as in planning for another machine, that of the usual one.
    """
    if _now.gpu_bytes is not None:
        return _now.gpu_bytes
    return _own_gpu_bytes() if torch.cuda.is_available() else USUAL_GPU_BYTES


@cache
def _own_gpu_bytes() -> int:
    return torch.cuda.mem_get_info()[1]


def _smallest_gpu() -> int:
    found = torch.tensor([_own_gpu_bytes()])
    torch_dist.all_reduce(found, torch_dist.ReduceOp.MIN)
    return int(found)


@contextmanager
def entered(
    device: str,
    tensor_parallel: int,
    timeout_seconds: float,
    apart: Mapping[str, float] | None = None,
) -> Iterator[World]:
    """Join the processes that a launcher started; alone, do nothing.

    A process's GPU becomes its current one, which FSDP and NCCL use without being told. `apart` are
    time-outs of START, REWARDS and SAVING; the usual one stands for those that are not named.
    """
    global _now
    if launched_size() == 1:
        yield ALONE
        return
    usual = dict.fromkeys((START, USUAL, REWARDS, SAVING), timeout_seconds)
    limits = {**usual, **(apart or {})}
    timeout, start = timedelta(seconds=timeout_seconds), timedelta(seconds=limits[START])
    if device == "cuda":
        torch.cuda.set_device(local_device(device))
    began_here = not torch_dist.is_initialized()  # Ray has begun it already
    if began_here:
        _begin(device, start)
    try:
        mesh = _mesh(device, tensor_parallel, timeout)
        groups = {
            what: _all_processes(timedelta(seconds=limits[what]))
            for what in (USUAL, REWARDS, SAVING)
        }
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timeout)
        gpu = _smallest_gpu() if device == "cuda" else None
        rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
        _now = World(rank, size, groups, limits, mesh, store, gpu)
        yield _now
    finally:
        _now = ALONE
        if began_here:
            torch_dist.destroy_process_group()


def _begin(device: str, timeout: timedelta) -> None:
    """Initialise the process group at MASTER_ADDR:MASTER_PORT."""
    # Objects are sent between CPUs, also where tensors are on GPUs.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    # NCCL then connects at once: what keeps the GPUs apart shows before anything is loaded.
    gpu = local_device(device) if device == "cuda" else None
    where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        if _is_one_machine():
            _stay_on_loopback()
        store = _own_store(timeout)
        if store is None:
            torch_dist.init_process_group(backend, timeout=timeout, device_id=gpu)
        else:
            torch_dist.init_process_group(
                backend,
                timeout=timeout,
                store=store,
                rank=launched_rank(),
                world_size=launched_size(),
                device_id=gpu,
            )
    except ValueError as error:  # a variable is not set
        raise UserError(f"The launcher left something out: {one_line(error)}") from None
    except (RuntimeError, OSError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            raise UserError(
                f"The processes cannot meet at {where}, as another program uses that port; set "
                f"MASTER_PORT, or torchrun's --master-port, to a free one."
            ) from None
        raise OthersLost(
            f"Process {launched_rank()} of {launched_size()} could not meet the others at {where} "
            f"in {timeout.total_seconds():g} s (launch.{START}): {one_line(error)}"
        ) from None


def _is_one_machine() -> bool:
    """Return whether all processes are on this machine: torchrun says so, or the address does."""
    local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return local or os.environ.get("MASTER_ADDR", "") in LOOPBACK


def _stay_on_loopback() -> None:
    """Make gloo listen on the loopback interface only: it authenticates no one."""
    if LOOPBACK_INTERFACE in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)


def _own_store(timeout: timedelta) -> Store | None:
    """Return a store on loopback, served by rank 0; torch's own would listen on every address.

    None where torchrun serves it, or the processes meet on a network.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if by_torchrun or address not in LOOPBACK or not port.isdecimal():
        return None
    first = launched_rank() == 0
    family = socket.AF_INET6 if address == "::1" else socket.AF_INET
    listener = socket.create_server((address, int(port)), family=family) if first else None
    return TCPStore(
        address,
        int(port),
        launched_size(),
        is_master=first,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _all_processes(timeout: timedelta) -> torch_dist.ProcessGroup:
    """Make a group of all for objects, which are sent between CPUs."""
    group = torch_dist.new_group(timeout=timeout, backend="gloo")
    return cast(torch_dist.ProcessGroup, group)


def _mesh(device: str, tensor_parallel: int, timeout: timedelta) -> DeviceMesh:
    """Make the mesh data x tensor; neighbouring ranks share one copy of a model.

    The groups of a mesh that torch makes would wait for half an hour.
    """
    ranks = torch.arange(torch_dist.get_world_size()).view(-1, tensor_parallel)
    groups = []
    for rows in (ranks.T, ranks):
        made = {tuple(row): torch_dist.new_group(row, timeout) for row in rows.tolist()}
        groups += [group for row, group in made.items() if torch_dist.get_rank() in row]
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=("data", "tensor"))
