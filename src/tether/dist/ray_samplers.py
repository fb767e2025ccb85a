"""Samplers as Ray actors: started, given weights and chunks of rows, and ended, from the training
process, which is outside of Ray's own workers."""

import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tether.config import LaunchSection, cores
from tether.dist.ray_cluster import connected
from tether.dist.ray_launch import enter_folder, refuse_other_versions, versions
from tether.errors import RunStopped, SamplerLost, UserError, one_line

KILLING_SECONDS = 10.0


@runtime_checkable
class Host(Protocol):
    """What samples, in the process of an actor."""

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None: ...

    def sample(self, chunk: Any) -> Any: ...


def refuse_no_room(launch: LaunchSection) -> None:
    """Refuse more samplers than this machine has room for, where they are to run here."""
    if launch.samplers == 0:
        return
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            f"launch.samplers = {launch.samplers} needs Ray, which is not installed: "
            f"pip install '.[ray]' in tether's source folder; or write 0."
        )
    if _is_elsewhere(launch):
        return  # a cluster may grow: a run waits for it, and `tether check` asks it
    here = {"CPU": float(cores()), "GPU": float(torch.cuda.device_count())}
    for name, amount in launch.sampler_resources.items():
        needed, room = launch.samplers * amount, here.get(name, 0.0)
        if needed > room:
            raise UserError(
                f"launch.samplers = {launch.samplers} with launch.sampler_resources {name}: "
                f"{amount:g} need {needed:g} of {name}, and this machine has {room:g}; lower one "
                f"of them, or name a cluster by launch.address."
            )


def refuse_small_cluster(launch: LaunchSection) -> None:
    """Refuse more samplers than the cluster that `launch` names has room for as it is now."""
    if launch.samplers == 0 or not _is_elsewhere(launch):
        return
    with _signals_kept(), connected(launch.address, workers=1) as ray:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(_seats(node, launch) for node in nodes)
    if room < launch.samplers:
        needed = ", ".join(f"{n}: {x:g}" for n, x in launch.sampler_resources.items())
        raise UserError(
            f"launch.samplers = {launch.samplers}, each with launch.sampler_resources "
            f"{{{needed}}}, and the cluster at launch.address has room for {room} now; lower one "
            f"of them, or add nodes first."
        )


def _is_elsewhere(launch: LaunchSection) -> bool:
    return launch.address is not None or "RAY_ADDRESS" in os.environ


def _seats(node: Mapping[str, float], launch: LaunchSection) -> int:
    """Return how many samplers fit on a node with these resources, up to all of them."""
    needed = launch.sampler_resources.items()
    fit = [int(node.get(name, 0.0) / amount + 1e-6) for name, amount in needed]
    return min([launch.samplers, *fit])


class RayFleet:
    """Actors on the cluster that `launch` names, or on one of this machine that ends with them.

    `make` is called in the process of each.
    """

    def __init__(self, make: Callable[[], Host], launch: LaunchSection) -> None:
        self.launch = launch
        self.job = {"make": make, "versions": versions(), "folder": os.getcwd()}
        self.held = ExitStack()

    def connect(self) -> None:
        """Connect to Ray; in the main thread, as Ray concerns itself with signals."""
        refuse_no_room(self.launch)
        with _signals_kept():
            cluster = connected(self.launch.address, workers=1, loopback=True)
            self.ray = self.held.enter_context(cluster)

    def add(self, name: str) -> tuple[Any, Any]:
        resources = dict(self.launch.sampler_resources)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        with self._cluster_there():
            actor = self.ray.remote(**options)(Seat).remote(self.job)
            return actor, actor.start.remote()

    def share(self, weights: Any) -> Any:
        """Put weights into the object store: one copy per machine, which its samplers read."""
        packed = {name: _pack(tensor) for name, tensor in weights.tensors.items()}
        with self._cluster_there():
            return [self.ray.put(packed)]  # in a list, or Ray would resolve it before every call

    def ask(self, sampler: Any, weights: Any, shared: Any, chunk: Any) -> Any:
        return sampler.sample.remote(weights.serial, weights.version, shared, chunk)

    def wait(self, tickets: Sequence[Any], seconds: float) -> Collection[Any]:
        with self._cluster_there():
            ended, _ = self.ray.wait([*tickets], num_returns=1, timeout=seconds)
            return ended

    def result(self, ticket: Any) -> Any:
        try:
            found, refusal = self.ray.get(ticket)
        except self.ray.exceptions.RayTaskError as error:
            raise RuntimeError(f"a sampler failed:\n{error}") from None
        except self.ray.exceptions.RayError as error:
            raise SamplerLost(_why(error)) from None
        if refusal is not None:
            raise refusal
        return found

    def end(self, sampler: Any) -> None:
        with self._cluster_there():
            self.ray.kill(sampler, no_restart=True)

    def room(self) -> str:
        """Say what the cluster has, in the middle of a sentence."""
        total = self.ray.cluster_resources()
        needed = ", ".join(f"{n} {x:g}" for n, x in self.launch.sampler_resources.items())
        has = ", ".join(f"{n} {total.get(n, 0):g}" for n in self.launch.sampler_resources)
        return f"each needs {needed}, where the cluster has {has}"

    def close(self) -> None:
        with _signals_kept():
            self.held.close()

    @contextmanager
    def _cluster_there(self) -> Iterator[None]:
        try:
            yield
        except self.ray.exceptions.RayError as error:
            raise RunStopped(
                f"The Ray cluster of launch.samplers no longer answers: {one_line(error)}."
            ) from None


def _why(error: Exception) -> str:
    """Return the first sentence of what Ray says of an actor that is gone; more is for its logs."""
    return one_line(error).split(". ")[0].removesuffix(".")


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the handlers of signals, of which Ray takes some."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Seat:
    """The actor: a host, and the weights that it holds. A refusal is returned, not raised, so that
    it arrives as it is."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job = job
        self.serial: int | None = None

    def start(self) -> tuple[int, Exception | None]:
        """Make the host; return the process's id."""
        try:
            refuse_other_versions("A sampler", self.job["versions"])
            enter_folder(self.job["folder"])
            self.host: Host = self.job["make"]()
        except (UserError, RunStopped) as refusal:
            return os.getpid(), refusal
        return os.getpid(), None

    def sample(
        self, serial: int, version: int, shared: list[Any], chunk: Any
    ) -> tuple[Any, Exception | None]:
        """Sample a chunk with these weights, which are fetched if they are not the last ones."""
        if serial != self.serial:
            import ray

            packed = cast(dict[str, Any], ray.get(shared[0]))
            self.host.load(version, {name: _unpack(*one) for name, one in packed.items()})
            self.serial = serial
        try:
            return self.host.sample(chunk), None
        except (UserError, RunStopped) as refusal:
            return None, refusal


def _pack(tensor: Tensor) -> tuple[np.ndarray, bool]:
    """Return the tensor as an array that Ray does not copy when it is read, and whether its numbers
    are bfloat16, which numpy does not know."""
    coarse = tensor.dtype == torch.bfloat16
    return (tensor.view(torch.int16) if coarse else tensor).numpy(), coarse


def _unpack(array: np.ndarray, coarse: bool) -> Tensor:
    tensor = torch.tensor(array)
    return tensor.view(torch.bfloat16) if coarse else tensor
