"""Ray Train as the launcher: it places workers, and starts them anew when some are lost.

The command that a person typed stays where it was typed and follows what its workers do.
"""

import importlib.metadata
import math
import os
import platform
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Protocol, TypeVar, runtime_checkable

from tether import __version__
from tether.config import LaunchSection, cores
from tether.dist.environment import launched_rank
from tether.dist.ray_cluster import connected
from tether.dist.ray_mailbox import Mailbox, WorkerMailbox, open_mailbox
from tether.errors import OthersLost, RunStopped, UserError, one_line

T = TypeVar("T")

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 5.0  # for the first worker to say how it ended, once another has
GOODBYE_SECONDS = 30.0  # for Ray to end its workers, once they are done
ACCELERATOR_SHARE = 0.001  # of a node's kind of GPU, as Ray asks for one
START_SECONDS = 120.0  # for workers to start where there is room; torch alone takes a while


@runtime_checkable
class Signals(Protocol):
    """Remembers the signal that the command was sent, while entered."""

    signal: signal.Signals | None

    def __enter__(self) -> "Signals": ...

    def __exit__(self, *exception: object) -> None: ...


class InterruptedBeforeStart(Exception):
    """A signal came before there was anything to save."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


def run_on_ray(
    work: Callable[[WorkerMailbox], T],
    settings: LaunchSection,
    device: str,
    threads: int,
    on_message: Callable[..., None],
    signals: Signals,
) -> T:
    """Return what `work` returns in the first worker, or raise the error that one ended with.

    `on_message` is called with the first worker's messages; `signals` are forwarded to all.
    """
    workers = settings.num_workers or 1
    # In this order: connecting to Ray replaces the signal handlers.
    each = settings.resources_of_worker(threads, use_gpu=False)["CPU"]
    # Ray counts CPUs and divides none: a cluster of this machine alone has what its workers need.
    cpus = max(cores(), math.ceil(workers * each))
    with connected(settings.address, workers, cpus) as ray, signals:
        use_gpu = _wants_gpu(ray, device, workers)
        needs = settings.resources_of_worker(threads, use_gpu)
        mailbox = ray.remote(num_cpus=0)(Mailbox).remote()
        job = {"mailbox": mailbox, "work": work, "versions": versions(), "folder": os.getcwd()}
        fit = ray.remote(num_cpus=0, max_retries=0)(_fit)
        placed = fit.remote(job, settings.model_dump(), workers, needs)
        try:
            driver = _Driver(ray, mailbox, placed, settings, on_message, signals, needs)
            result = driver.follow()
            ray.wait([placed], timeout=GOODBYE_SECONDS)
        except ray.exceptions.RayError as error:
            raise explain(error, settings.max_restarts) from None
        return result


class _Driver:
    """The command's side: pass on messages and signals until the workers have ended."""

    def __init__(
        self,
        ray: ModuleType,
        mailbox: Any,
        placed: Any,
        settings: LaunchSection,
        on_message: Callable[..., None],
        signals: Signals,
        needs: Mapping[str, float],
    ) -> None:
        self.ray, self.mailbox, self.placed = ray, mailbox, placed
        self.needs = dict(needs)
        if settings.accelerator_type is not None:
            self.needs[f"accelerator_type:{settings.accelerator_type}"] = ACCELERATOR_SHARE
        self.settings, self.on_message, self.signals = settings, on_message, signals
        self.began = time.monotonic()
        self.first_end = math.inf
        self.arrived = self.warned = False
        self.passed: signal.Signals | None = None
        self.ends: dict[int, tuple[Any, Exception | None]] = {}

    def follow(self) -> Any:
        while not self._is_over():
            over, _ = self.ray.wait([self.placed], timeout=POLL_SECONDS)
            self._read_mailbox()
            self._forward_signal()
            if not self.arrived:
                self._wait_for_room()
            if over and not self.ends:
                raise self._failure()
        result, error = self.ends.get(0) or next(end for end in self.ends.values() if end[1])
        if error is not None:
            raise error
        return result

    def _is_over(self) -> bool:
        """Return whether the first worker has ended, which stands for all, or another one failed
        and the first has not noticed in time."""
        failed = any(error is not None for _, error in self.ends.values())
        late = time.monotonic() > self.first_end + PATIENCE_SECONDS
        return 0 in self.ends or (failed and late)

    def _read_mailbox(self) -> None:
        for kind, what in self.ray.get(self.mailbox.take.remote()):
            self.arrived = True
            if kind == "message":
                self.on_message(*what)
            elif kind == "ended":
                rank, result, error = what
                self.ends[rank] = (result, error)
                self.first_end = min(self.first_end, time.monotonic())

    def _forward_signal(self) -> None:
        number = self.signals.signal
        if number is None or number == self.passed:
            return
        if not self.arrived:
            raise InterruptedBeforeStart(number)
        self.ray.get(self.mailbox.send_signal.remote(int(number)))
        self.passed = number

    def _wait_for_room(self) -> None:
        """Wait for a cluster that is busy or grows, up to a limit."""
        workers, limit = self.settings.num_workers or 1, self.settings.start_timeout_seconds
        kind = self._scarcest(workers)
        total = self.ray.cluster_resources().get(kind, 0)
        enough = total >= workers * self.needs[kind]
        why = f"launch.num_workers = {workers} needs {self._each(kind)} each, and the cluster has "
        why += f"{total:g}"
        if enough:
            limit = max(limit, START_SECONDS)
        if time.monotonic() > self.began + limit:
            free = self.ray.available_resources().get(kind, 0)
            raise UserError(
                f"No worker has started in {limit:g} s (launch.start_timeout_seconds): {why}, of "
                f"which {free:g} are free."
            )
        if not enough and not self.warned:
            self.on_message("warned", f"waiting for room: {why}")
            self.warned = True

    def _scarcest(self, workers: int) -> str:
        """Return what the cluster has too little of for the workers: GPUs first, else CPUs."""
        has = self.ray.cluster_resources()
        lacks = [n for n, x in self.needs.items() if has.get(n, 0) < workers * x]
        return "GPU" if "GPU" in lacks else (lacks or ["CPU"])[0]

    def _each(self, kind: str) -> str:
        """Say what a worker needs of it."""
        amount, (name, _, accelerator) = self.needs[kind], kind.partition(":")
        if accelerator:
            return f"a node with {accelerator} (launch.accelerator_type)"
        if name == "CPU" and amount > 1 and name not in self.settings.worker_resources:
            return f"{amount:g} CPU (threads)"
        return f"a {name}" if amount == 1 else f"{amount:g} {name}"

    def _failure(self) -> Exception:
        """Return why Ray gave up."""
        try:
            self.ray.get(self.placed)
        except Exception as error:
            return explain(error, self.settings.max_restarts)
        return RunStopped("Ray's workers ended without saying how.")


def explain(error: Exception, max_restarts: int) -> Exception:
    """Turn what Ray Train raised into a sentence; a fault of the program stays one."""
    if "No module named 'tether'" in str(error):
        return UserError("tether is not installed on the Ray cluster; install it on every machine.")
    cause = getattr(error, "cause", None) or error
    failures: dict[int, Exception] = getattr(cause, "worker_failures", {})
    if not failures:
        return RunStopped(f"Ray could not run the workers: {one_line(cause)}")
    reasons = {rank: getattr(failure, "_base_exc", failure) for rank, failure in failures.items()}
    lost = [rank for rank, why in reasons.items() if type(why).__module__.startswith("ray.")]
    silent = [one_line(why) for why in reasons.values() if isinstance(why, OthersLost)]
    if not lost and not silent:
        rank, failure = next(iter(failures.items()))
        return RuntimeError(f"worker {rank} of the run failed:\n{failure}")
    who = f"Worker {', '.join(map(str, sorted(lost)))} of the run was lost" if lost else silent[0]
    return RunStopped(
        f"{who.removesuffix('.')}; workers were started {max_restarts + 1} times "
        f"(launch.max_restarts = {max_restarts}), and `tether resume` goes on from the newest "
        f"checkpoint."
    )


def _fit(
    job: dict[str, Any], launch: dict[str, Any], workers: int, needs: Mapping[str, float]
) -> None:
    """Place the workers, from a node of the cluster, and place them anew when some are lost."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    use_gpu = needs.get("GPU", 0) > 0
    restarts, seconds = launch["max_restarts"], launch["start_timeout_seconds"]
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(max(seconds, START_SECONDS))
    # Ray stores its own results there; nothing of them is needed beside the run directory.
    with tempfile.TemporaryDirectory(prefix="tether-ray-") as storage:
        failures = FailureConfig(max_failures=restarts, controller_failure_limit=restarts)
        trainer = TorchTrainer(
            _work,
            train_loop_config=job,
            torch_config=TorchConfig(
                backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo", timeout_s=math.ceil(seconds)
            ),
            scaling_config=ScalingConfig(
                num_workers=workers,
                use_gpu=use_gpu,
                resources_per_worker=dict(needs),
                placement_strategy=launch["placement"],
                accelerator_type=launch["accelerator_type"],
            ),
            run_config=RunConfig(name="tether", storage_path=storage, failure_config=failures),
        )
        trainer.fit()


def _work(job: dict[str, Any]) -> None:
    """Run in a worker. An error of the user's or of the run ends it; after anything else, such as
    the loss of another worker, Ray starts all anew."""
    mailbox = open_mailbox(job["mailbox"])
    mailbox.arrive()
    try:
        refuse_other_versions(f"Worker {launched_rank()}", job["versions"])
        enter_folder(job["folder"])
        result, error = job["work"](mailbox), None
    except OthersLost:
        raise
    except (UserError, RunStopped) as refusal:
        result, error = None, refusal
    mailbox.end(result, error)


def versions() -> dict[str, str]:
    """Return the versions that must be the same on both sides."""
    found = {name: importlib.metadata.version(name).split("+")[0] for name in ("torch", "ray")}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "tether": __version__, **found}


def refuse_other_versions(who: str, expected: Mapping[str, str]) -> None:
    """Refuse to work with other versions than the command has."""
    here = versions()
    other = [name for name in expected if here[name] != expected[name]]
    if other:
        found, wanted = (
            ", ".join(f"{name} {side[name]}" for name in other) for side in (here, expected)
        )
        raise UserError(
            f"{who} on {socket.gethostname()} has {found}, where the command "
            f"that started it has {wanted}; install the same on every machine."
        )


def enter_folder(folder: str) -> None:
    """Change to the folder where the command was typed: paths in a config start there."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be entered on {socket.gethostname()}: {one_line(error)}; start from "
            f"a folder that every machine of the cluster sees."
        ) from None


def _wants_gpu(ray: ModuleType, device: str, workers: int) -> bool:
    """Return whether workers get a GPU each; `auto` gives them one where the cluster has any."""
    if device != "auto":
        return device.startswith("cuda")
    gpus = ray.cluster_resources().get("GPU", 0)
    if 0 < gpus < workers:
        raise UserError(
            f"device is auto, and the Ray cluster has {gpus:g} GPUs for launch.num_workers = "
            f"{workers}: write --device cuda to wait for the others "
            f"(launch.start_timeout_seconds), --device cpu to use none, or --launch.num_workers "
            f"{gpus:g}."
        )
    return gpus >= workers
