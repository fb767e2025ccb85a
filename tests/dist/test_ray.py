"""Runs whose workers Ray places, on clusters of this machine."""

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from helpers import changed, read_jsonl

from dist.leftovers import descendants, wait_until_gone
from dist.processes import free_port
from tether import api
from tether.dist import ray_launch
from tether.errors import UserError
from tether.train.watch import Watcher

# Of the tests' own clusters; Ray reads it when it is imported.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_worker_niceness": "0",  # its workers would wait for whatever else runs here
}
pytest.importorskip("ray", reason="Ray is an extra; `make test` installs it")

# Scores by letters; the worker of the second process is killed once, in its third iteration.
REWARD = """
import os, signal
from pathlib import Path

KILLED = Path({killed!r})
rows = []

def score(response):
    rows.append(response)
    if os.environ.get("RANK") == "1" and len(rows) == 15 and not KILLED.exists():
        KILLED.touch()
        os.kill(os.getppid(), signal.SIGKILL)
    return len(set(response)) / 8
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[str]:
    """The address of a cluster with two CPUs, as somebody else would have started it."""
    address = f"127.0.0.1:{free_port()}"
    said = tmp_path_factory.mktemp("cluster") / "said.txt"
    words = "start --head --block --num-cpus 2 --include-dashboard=false --disable-usage-stats"
    ray = Path(sys.executable).with_name("ray")
    with said.open("wb") as output:
        process = subprocess.Popen(
            [ray, *words.split(), "--port", address.rpartition(":")[2]],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + 120
    while "Ray runtime started" not in said.read_text():
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.2)
    yield address
    for pid in [*descendants(process.pid), process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def config(tiny_config, tmp_path) -> dict:
    reward = tmp_path / "letters.py"
    reward.write_text(REWARD.format(killed=str(tmp_path / "killed")))
    return changed(
        tiny_config,
        reward__kind=f"{reward}:score",
        data__heldout=None,
        train={"iterations": 4, "eval_every": 0, "checkpoint_every": 1, "keep_last": 1},
        launch={"kind": "ray", "num_workers": 2},
    )


class Heard(Watcher):
    """What the command was told."""

    def __init__(self) -> None:
        self.iterations: list[int] = []
        self.resumes: list[int] = []

    def resumed(self, iterations_done, checkpoint) -> None:
        self.resumes.append(iterations_done)

    def iterated(self, record) -> None:
        self.iterations.append(record.iteration)


def test_one_worker_on_a_cluster_of_its_own_trains_as_without_ray(config, tmp_path):
    short = changed(config, train__iterations=1, launch__num_workers=1, reward__kind="exact_answer")
    heard = Heard()
    placed = api.train(short, watch=heard)
    assert heard.iterations == [0]
    alone = api.train(changed(short, run__dir=str(tmp_path / "alone"), launch={"kind": "local"}))
    assert placed.iterations_done == alone.iterations_done == 1
    assert files(placed.run) == files(alone.run)


@pytest.mark.long
def test_a_worker_killed_in_mid_run_changes_no_bit(config, cluster, tmp_path):
    config["launch"]["address"] = cluster
    heard = Heard()
    disturbed = api.train(config, watch=heard)
    assert (tmp_path / "killed").exists()
    assert heard.resumes == [2]
    assert heard.iterations == [0, 1, 2, 3]
    smooth = api.train(changed(config, run__dir=str(tmp_path / "smooth")))
    assert [e["kind"] for e in read_jsonl(smooth.run / "events.jsonl")] == []
    assert disturbed.iterations_done == smooth.iterations_done == 4
    assert files(disturbed.run) == files(smooth.run)


@pytest.mark.long
def test_a_stage_on_ray_is_that_of_one_process(tiny_model_dir, cluster, tmp_path):
    rows = [{"prompt": "a" * n, "response": "b" * (9 - n)} for n in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"dir": str(tmp_path / "ray")},
        "model": {"start": tiny_model_dir, "dtype": "float64"},
        "data": dict.fromkeys(("train", "heldout"), str(tmp_path / "rows.jsonl")),
        "train": {"passes": 2, "minibatch_rows": 4, "lr": 1e-2},
        "launch": {"kind": "ray", "num_workers": 2, "weights": "sharded", "address": cluster},
    }
    heard = Heard()
    placed = api.sft(config, watch=heard)
    assert heard.iterations == [0, 1, 2, 3]
    alone = api.sft(changed(config, run__dir=str(tmp_path / "alone"), launch={}))
    for name in ("metrics.jsonl", "evals.jsonl"):
        ours, theirs = (read_jsonl(result.run / name) for result in (placed, alone))
        assert [x["loss"] for x in ours] == pytest.approx([x["loss"] for x in theirs], rel=1e-9)


@pytest.mark.long
def test_what_a_worker_refuses_is_what_the_command_says(config, cluster, monkeypatch):
    config["launch"]["address"] = cluster
    broken = changed(config, reward__kind="/nowhere.py:score")
    with pytest.raises(UserError, match=r"nowhere\.py, which is not a file"):
        api.train(broken)
    assert not Path(config["run"]["dir"]).exists()
    monkeypatch.setattr(ray_launch, "versions", lambda: {"torch": "1.0"})
    with pytest.raises(UserError, match=r"has torch 2\S+, where the command .* has torch 1\.0;"):
        api.train(config)


@pytest.mark.long
def test_a_signal_ends_the_command_with_all_saved_and_nobody_left(config, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    (tmp_path / "killed").touch()
    recipe.write_text(yaml.safe_dump(changed(config, train__iterations=100_000)))
    run = Path(config["run"]["dir"])
    command = subprocess.Popen(
        [sys.executable, "-m", "tether", "train", recipe],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_iterations(run, 2)
        below = descendants(command.pid)
        assert len(below) > 4
        command.send_signal(signal.SIGTERM)
        said, complaints = command.communicate(timeout=120)
    finally:
        command.kill()
    done = len(read_jsonl(run / "metrics.jsonl"))
    assert command.returncode == 128 + signal.SIGTERM, complaints
    assert f"stopped by SIGTERM after {done} of 100000 iterations" in said
    assert complaints == ""
    ours = [line for line in said.splitlines() if line.lstrip().startswith("processes")]
    others = set(said.splitlines()) - set(ours)
    assert not any("ray" in line.lower() for line in others if "/" not in line)
    wait_until_gone(below)
    alone = {"launch.kind": "local", "launch.num_workers": None, "train.iterations": done + 1}
    assert api.resume(run, alone).iterations_done == done + 1


def files(run: Path) -> dict[str, str]:
    """Hashes of what a run must repeat to the bit."""
    names = [run / "metrics.jsonl", *sorted(run.glob("checkpoints/*/**/*.safetensors"))]
    assert len(names) > 4
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in names}


def wait_for_iterations(run: Path, number: int) -> None:
    deadline = time.monotonic() + 300
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(read_jsonl(metrics)) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)
