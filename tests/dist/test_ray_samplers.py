"""Samplers apart as Ray actors, on a cluster of this machine."""

import os
import secrets
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers import changed, distinct_letters, read_jsonl
from torch import nn

import tether
from dist.leftovers import descendants, listening, wait_until_gone
from tether.dist.ray_launch import versions
from tether.dist.ray_samplers import Seat, _pack, _unpack
from tether.errors import UserError
from tether.models.precision import Bfloat16Linear, names_read_rounded
from tether.train.watch import Watcher

# Of the tests' own clusters; Ray reads it when it is imported.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN", secrets.token_hex(32)),
    "RAY_worker_niceness": "0",  # its workers would wait for whatever else runs here
}
pytest.importorskip("ray", reason="Ray is an extra; `make test` installs it")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_arrive_bit_for_bit(dtype):
    tensor = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = _unpack(*_pack(tensor))
    assert found.dtype == dtype
    assert torch.equal(found, tensor)


def test_only_what_products_in_bfloat16_alone_read_is_sent_rounded():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(4, 4), nn.LayerNorm(4)
            self.head, self.inner = (nn.Linear(4, 4, bias=bias) for bias in (False, True))
            self.head.weight = self.embed.weight  # tied: rows of it are read as they are
            for layer in (self.head, self.inner):
                layer.__class__ = Bfloat16Linear

    assert names_read_rounded(Net()) == {"inner.weight", "inner.bias"}


class Host:
    def __init__(self, loaded: list) -> None:
        self.loaded = loaded

    def load(self, version, weights) -> None:
        self.loaded.append((version, weights["w"].tolist()))

    def sample(self, chunk):
        if chunk == "refused":
            raise UserError("not this")
        return f"sampled {chunk}"


def test_a_seat_fetches_weights_only_when_they_are_others(monkeypatch):
    fetched, loaded = [], []
    fake = SimpleNamespace(get=lambda box: fetched.append(1) or box)
    monkeypatch.setitem(sys.modules, "ray", fake)
    job = {"make": partial(Host, loaded), "versions": versions(), "folder": os.getcwd()}
    seat = Seat(job)
    assert seat.start() == (os.getpid(), None)
    one, two = ([{"w": _pack(torch.tensor([x]))}] for x in (1.0, 2.0))
    assert seat.sample(5, 0, one, "a") == ("sampled a", None)
    assert seat.sample(5, 0, one, "b") == ("sampled b", None)
    assert seat.sample(6, 1, two, "c") == ("sampled c", None)
    assert (len(fetched), loaded) == (2, [(0, [1.0]), (1, [2.0])])
    found, refusal = seat.sample(6, 1, two, "refused")
    assert found is None
    assert str(refusal) == "not this"


def test_a_seat_with_other_versions_refuses_by_name():
    job = {"make": Host, "versions": {**versions(), "torch": "1.0"}, "folder": os.getcwd()}
    _, refusal = Seat(job).start()
    assert isinstance(refusal, UserError)
    assert "A sampler on" in str(refusal)
    assert "torch 1.0" in str(refusal)


class Killer(Watcher):
    """Kills a sampler after the first iteration, and notes who is there."""

    def __init__(self) -> None:
        self.below: set[int] = set()
        self.killed = 0

    def iterated(self, record) -> None:
        pids = descendants(os.getpid())
        self.below.update(pids)
        seats = [p for p in pids if Path(f"/proc/{p}/cmdline").read_bytes()[:9] == b"ray::Seat"]
        if not self.killed and seats:
            self.killed = seats[0]
            os.kill(self.killed, signal.SIGKILL)


@pytest.mark.long
def test_samplers_on_ray_one_of_them_killed_end_with_the_bits_of_one_process(tiny_config, tmp_path):
    config = changed(
        tiny_config,
        rollout__lag=1,
        rollout__chunk_tokens=60,
        train={"iterations": 4, "eval_every": 0, "checkpoint_every": 2},
    )
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    alone = tether.train(changed(config, run__dir=str(tmp_path / "alone")), reward=distinct_letters)
    killer = Killer()
    apart = tether.train(
        changed(config, launch={"samplers": 2}), reward=distinct_letters, watch=killer
    )
    assert killer.killed
    assert len(read_jsonl(apart.run / "metrics.jsonl")) == 4
    assert (apart.run / "metrics.jsonl").read_bytes() == (alone.run / "metrics.jsonl").read_bytes()
    for file in alone.checkpoint.rglob("*.safetensors"):
        there = apart.checkpoint / file.relative_to(alone.checkpoint)
        assert there.read_bytes() == file.read_bytes()
    assert "sampler_lost" in [e["kind"] for e in read_jsonl(apart.run / "events.jsonl")]
    assert before == {s: signal.getsignal(s) for s in before}
    wait_until_gone(sorted(killer.below))


# What Ray makes of the address that it is given, in a process that has not imported it before.
ADDRESS = """
from tether.dist import ray_cluster

def init(ray, address, options):
    from ray._private.services import resolve_ip_for_localhost
    print(address, resolve_ip_for_localhost(options["_node_ip_address"]))

ray_cluster._init = init
with ray_cluster.connected(None, 1, loopback=True):
    pass
"""


def test_ray_leaves_a_cluster_of_this_machine_on_the_loopback_address():
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", ADDRESS]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["local", "127.0.0.1"]


REWARD = """
from pathlib import Path

def score(response):
    if Path({flag!r}).exists():
        raise ValueError("no more")
    return len(set(response)) / 8
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ["normal end", "error", "Ctrl-C", "kill -9"])
def test_nothing_listens_beyond_loopback_and_nothing_is_left(tiny_config, tmp_path, way):
    flag, reward, recipe = (tmp_path / name for name in ("flag", "reward.py", "recipe.yaml"))
    reward.write_text(REWARD.format(flag=str(flag)))
    many = {"iterations": 3 if way == "normal end" else 100_000, "eval_every": 0}
    config = changed(
        tiny_config,
        reward__kind=f"{reward}:score",
        data__heldout=None,
        rollout__lag=1,
        rollout__chunk_tokens=60,
        train=many,
        launch={"samplers": 2},
    )
    recipe.write_text(yaml.safe_dump(config))
    metrics = Path(config["run"]["dir"]) / "metrics.jsonl"
    command = subprocess.Popen(
        [sys.executable, "-m", "tether", "train", recipe],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    below: set[int] = set()
    ports: set[str] = set()

    def watch_until(happened, seconds: float = 600.0) -> None:
        deadline = time.monotonic() + seconds
        while command.poll() is None and not happened():
            assert time.monotonic() < deadline
            found = descendants(command.pid)
            below.update(found)
            ports.update(listening([command.pid, *found]))
            time.sleep(0.1)

    try:
        watch_until(lambda: metrics.exists() and len(read_jsonl(metrics)) >= 2)
        match way:
            case "error":
                flag.touch()
            case "Ctrl-C":  # a terminal sends it to the whole group
                os.killpg(command.pid, signal.SIGINT)
            case "kill -9":
                command.kill()
        watch_until(lambda: False, 120.0)
        said = command.communicate()[1]
    finally:
        command.kill()
    codes = {"normal end": 0, "error": 1, "Ctrl-C": 130, "kill -9": -9}
    assert command.returncode == codes[way], said
    assert len(below) > 4
    assert len(ports) > 4
    assert [port for port in ports if not port.startswith(("127.", "::1:"))] == []
    wait_until_gone(sorted(below), 30.0)
