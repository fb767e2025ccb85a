"""What can go wrong before and while processes run together: one sentence, and nobody is left."""

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers import changed, read_jsonl, table

from dist.processes import _server, free_port
from tether import api
from tether.config import LaunchSection
from tether.dist import ray_launch
from tether.dist.ray_cluster import connected, import_ray
from tether.errors import OthersLost, RunStopped, UserError
from tether.ppo.roles import pick_device
from tether.train import session


def _train(rank, size, port, config, ending) -> None:
    """One of the processes of a run; how it ended goes into a file."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        result = api.train(config, resume=True)
        said = f"done {result.iterations_done} {result.interrupted and result.interrupted.name}"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    Path(f"{ending}{rank}").write_text(said, encoding="utf-8")


class Processes:
    """Processes of one run that a test can hit."""

    def __init__(self, size: int, config: dict, ranks: list[int] = (), port: int = 0) -> None:
        self.run = Path(config["run"]["dir"])
        self.ending = self.run.with_name("ending-")
        port = port or free_port()
        arguments = (size, port, config, self.ending)
        self.processes = {
            rank: _server.Process(target=_train, args=(rank, *arguments))
            for rank in ranks or range(size)
        }
        for process in self.processes.values():
            process.start()

    def wait_for_iterations(self, number: int) -> None:
        deadline = time.monotonic() + 300
        while len(self.lines()) < number:
            assert time.monotonic() < deadline, self.said(0)
            time.sleep(0.02)

    def lines(self) -> list[dict]:
        path = self.run / "metrics.jsonl"
        return read_jsonl(path) if path.exists() else []

    def wait(self, rank: int, seconds: float) -> str:
        """How that one ended."""
        self.processes[rank].join(seconds)
        return self.said(rank)

    def said(self, rank: int) -> str:
        path = Path(f"{self.ending}{rank}")
        return path.read_text(encoding="utf-8") if path.exists() else "nothing yet"

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


@contextmanager
def running(*arguments, **named) -> Iterator[Processes]:
    processes = Processes(*arguments, **named)
    try:
        yield processes
    finally:
        processes.kill()


@pytest.fixture
def endless(tiny_config) -> dict:
    """A run that somebody else has to end."""
    return changed(
        tiny_config,
        data__heldout=None,
        train={"iterations": 100_000, "eval_every": 0, "checkpoint_every": 0},
        launch={
            "timeout_seconds": 3.0,
            "start_timeout_seconds": 3.0,
            "reward_timeout_seconds": 3.0,
            "save_timeout_seconds": 3.0,
        },
    )


def silence_of(rank: int, heard_by: int) -> str:
    return (
        f"Process {heard_by} of 2 cannot go on: no answer from process {rank} "
        f"(launch.timeout_seconds = 3)."
    )


def names_the_silent(said: str, rank: int, heard_by: int) -> bool:
    """Whatever they were waiting for: scores, a checkpoint, or anything else."""
    plain = re.sub(r"launch\.(reward_|save_)timeout", "launch.timeout", said)
    return plain.startswith(f"OthersLost: {silence_of(rank, heard_by)}")


@pytest.mark.long
def test_a_process_that_stands_still_is_named_by_the_others(endless):
    with running(2, endless) as run:
        run.wait_for_iterations(1)
        os.kill(run.processes[1].pid, signal.SIGSTOP)
        began = time.monotonic()
        said = run.wait(0, 20)
        assert time.monotonic() - began < 15
        assert names_the_silent(said, 1, heard_by=0)


@pytest.mark.long
def test_a_first_process_that_stands_still_is_named_as_well(endless):
    with running(2, endless) as run:
        run.wait_for_iterations(1)
        os.kill(run.processes[0].pid, signal.SIGSTOP)
        assert names_the_silent(run.wait(1, 20), 0, heard_by=1)


def test_a_process_that_dies_is_named_at_once(endless):
    with running(2, endless) as run:
        run.wait_for_iterations(1)
        os.kill(run.processes[1].pid, signal.SIGKILL)
        assert names_the_silent(run.wait(0, 20), 1, heard_by=0)


def test_what_only_one_process_finds_wrong_all_say(endless, tmp_path):
    """As where a file is on one machine and not on another."""
    elsewhere = changed(endless, model__actor=str(tmp_path / "nowhere"))
    port = free_port()
    with running(2, endless, [0], port) as good, running(2, elsewhere, [1], port) as bad:
        assert "nowhere" in bad.wait(1, 30)
        assert good.wait(0, 30) == bad.said(1)


def test_a_signal_to_one_ends_all_with_their_state_saved(endless):
    # A busy machine is not a lost process.
    patient = changed(endless, launch=dict.fromkeys(endless["launch"], 60.0))
    with running(2, patient) as run:
        run.wait_for_iterations(1)
        os.kill(run.processes[1].pid, signal.SIGTERM)
        ends = [run.wait(rank, 120) for rank in range(2)]
        done = len(run.lines())
        assert ends == [f"done {done} SIGTERM"] * 2
        assert (run.run / "checkpoints" / "LATEST").read_text() == f"{done:06d}\n"


def test_a_port_that_is_taken_is_named(endless):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running(2, endless, [0], port) as run:
            said = run.wait(0, 20)
    assert said.startswith("UserError")
    assert f"127.0.0.1:{port}, as another program uses that port" in said


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 0])
def test_a_process_alone_does_not_wait_for_ever(endless, rank):
    with running(2, endless, [rank]) as run:
        said = run.wait(rank, 30)
    assert said.startswith(f"OthersLost: Process {rank} of 2 could not meet the others")
    assert "in 3 s (launch.start_timeout_seconds)" in said


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install '\.\[ray\]'"):
        import_ray()


def test_an_address_that_does_not_answer_is_refused_at_once():
    began = time.monotonic()
    with pytest.raises(UserError, match="does not answer"), _joining(f"127.0.0.1:{free_port()}"):
        pass
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_something_else_answers_is_refused(scheme):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        answering = threading.Thread(target=lambda: other.accept()[0].sendall(b"220 mail here\r\n"))
        answering.start()
        address = f"{scheme}127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError, match="something else than Ray listens"), _joining(address):
            pass
        answering.join()


@pytest.mark.parametrize("address", ["head", "ray://head", "head:port", "127.0.0.1:99999999"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(UserError, match=r"launch\.address"), _joining(address):
        pass


def test_more_workers_than_cores_are_refused():
    with pytest.raises(UserError, match=r"launch\.num_workers is 4097"), _joining(None, 4097):
        pass


def _joining(address: str | None, workers: int = 2):
    return connected(address, workers)


def test_other_versions_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(ray_launch, "versions", lambda: {"torch": "2.12.0", "ray": "2.60.0"})
    with pytest.raises(UserError, match=r"has torch 2\.12\.0, where the .* has torch 2\.13\.0;"):
        ray_launch.refuse_other_versions("Worker 1", {"torch": "2.13.0", "ray": "2.60.0"})


class Failed(Exception):
    def __init__(self, **failures: Exception) -> None:
        self.worker_failures = {int(rank[1:]): error for rank, error in failures.items()}


def test_a_lost_worker_is_told_from_a_fault_of_the_program():
    gone = type("ActorDiedError", (Exception,), {"__module__": "ray.exceptions"})("x")
    silent = OthersLost(silence_of(1, heard_by=0))
    lost = ray_launch.explain(Failed(r0=silent, r1=gone), 2)
    assert isinstance(lost, RunStopped)
    assert str(lost).startswith("Worker 1 of the run was lost; workers were started 3 times")
    assert "no answer from process 1 (launch.timeout_seconds = 3); workers" in str(
        ray_launch.explain(Failed(r0=silent), 0)
    )
    nowhere = ray_launch.explain(Exception("ModuleNotFoundError: No module named 'tether'"), 2)
    assert isinstance(nowhere, UserError)
    fault = ray_launch.explain(Failed(r1=KeyError("beta")), 2)
    assert isinstance(fault, RuntimeError)
    assert "beta" in str(fault)


def test_ray_shares_the_cores_out(tiny_config):
    del tiny_config["threads"]
    alone = api.as_config(tiny_config).threads
    on_ray = changed(tiny_config, launch=LaunchSection(kind="ray", num_workers=2).model_dump())
    assert api.as_config(on_ray).threads == max(1, alone // 2)
    assert api.as_config(changed(on_ray, threads=7)).threads == 7


@table(
    "gpus, workers, device, wanted",
    [
        (0, 2, "auto", False),
        (2, 2, "auto", True),
        (8, 2, "auto", True),
        (0, 2, "cuda", True),  # waits for them
        (8, 2, "cpu", False),
    ],
)
def test_workers_get_a_gpu_each_where_there_are_enough(gpus, workers, device, wanted):
    cluster = SimpleNamespace(
        cluster_resources=lambda: {"CPU": 8, **({"GPU": gpus} if gpus else {})}
    )
    assert ray_launch._wants_gpu(cluster, device, workers) is wanted


def test_too_few_gpus_for_auto_are_refused_and_not_replaced_by_cpus():
    cluster = SimpleNamespace(cluster_resources=lambda: {"CPU": 64, "GPU": 3})
    with pytest.raises(UserError, match=r"has 3 GPUs for launch\.num_workers = 4: write --device"):
        ray_launch._wants_gpu(cluster, "auto", 4)


def test_waiting_for_gpus_is_called_so():
    said = []
    cluster = SimpleNamespace(cluster_resources=lambda: {"CPU": 64, "GPU": 3})
    settings = LaunchSection(kind="ray", num_workers=4)
    for needs in ({"CPU": 2, "GPU": 1}, {"CPU": 32}, {"CPU": 1, "big": 2}):
        driver = ray_launch._Driver(
            cluster, None, None, settings, lambda *told: said.append(told), None, needs
        )
        driver._wait_for_room()
    kind = LaunchSection(kind="ray", num_workers=4, accelerator_type="H100")
    driver = ray_launch._Driver(
        cluster, None, None, kind, lambda *told: said.append(told), None, {"CPU": 1}
    )
    driver._wait_for_room()
    room = "waiting for room: launch.num_workers = 4 needs"
    assert said == [
        ("warned", f"{room} a GPU each, and the cluster has 3"),
        ("warned", f"{room} 32 CPU (threads) each, and the cluster has 64"),
        ("warned", f"{room} 2 big each, and the cluster has 0"),
        (
            "warned",
            f"{room} a node with H100 (launch.accelerator_type) each, and the cluster has 0",
        ),
    ]


def test_what_a_worker_needs_reaches_ray(monkeypatch):
    """CPUs by its threads, a GPU where one is used, the kind of GPU, few nodes or many."""
    train, torch_train = pytest.importorskip("ray.train"), pytest.importorskip("ray.train.torch")
    asked = []
    monkeypatch.setattr(train, "ScalingConfig", lambda **fields: asked.append(fields))
    trainer = SimpleNamespace(fit=lambda: None)
    monkeypatch.setattr(torch_train, "TorchTrainer", lambda *a, **fields: trainer)
    given = {"placement": "SPREAD", "accelerator_type": "H100", "worker_resources": {"big": 2}}
    for fields, use_gpu in (({}, False), (given, True)):
        launch = LaunchSection(kind="ray", **fields)
        needs = launch.resources_of_worker(threads=6, use_gpu=use_gpu)
        ray_launch._fit({}, launch.model_dump(), 2, needs)
    assert [one["resources_per_worker"] for one in asked] == [
        {"CPU": 6},
        {"CPU": 6, "GPU": 1, "big": 2},
    ]
    names = "num_workers", "use_gpu", "placement_strategy", "accelerator_type"
    assert [[one[name] for name in names] for one in asked] == [
        [2, False, "PACK", None],
        [2, True, "SPREAD", "H100"],
    ]
    own = LaunchSection(kind="ray", worker_resources={"CPU": 1})
    assert own.resources_of_worker(threads=6, use_gpu=False) == {"CPU": 1}


@pytest.mark.parametrize("field", ["worker_resources: {CPU: 2}", "accelerator_type: H100"])
def test_what_only_ray_places_is_refused_without_it(tiny_config, field):
    launch = yaml.safe_load(f"{{{field}}}")
    with pytest.raises(UserError, match="is for Ray's workers; write kind: ray, or leave it out"):
        api.as_config(changed(tiny_config, launch=launch))


def test_more_processes_than_gpus_of_a_machine_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="Process 2 of this machine has no GPU, as there are 2"):
        pick_device("auto")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_determinism_is_switched_on_for_gpus_that_ask_for_it(tiny_config, monkeypatch, device):
    """On a CPU bits repeat without, and other kernels would give others."""
    asked = []
    monkeypatch.setattr(session, "repeat_on_gpus", lambda: asked.append(device))
    monkeypatch.setattr(session, "pick_device", torch.device)
    config = api.as_config(changed(tiny_config, deterministic=True, device=device))
    built = SimpleNamespace(close=lambda: None)
    job = SimpleNamespace(config=config, build=lambda reading: built)
    with ExitStack() as held:
        session._build(job, SimpleNamespace(reading=None), held)
    assert asked == (["cuda"] if device == "cuda" else [])
