"""SFT and reward modelling on several processes: the numbers of one; a run that was killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers import changed, few_or_many
from stages.test_sft import write_rows

from dist.processes import run_processes
from dist.test_runs import at, difference, lines
from tether import api
from tether.train.checkpoint_files import read_tensors
from tether.train.watch import Watcher

WORDS = ("a", "bc", "def", "ghij", "klmno", "pqrstu", "vwxyz", "0123456789")
LAUNCHES = {
    "replicated": {},
    "sharded": {"weights": "sharded"},
    "shared layers": {"weights": "sharded", "tensor_parallel": 2},
}


@pytest.fixture
def configs(tiny_model_dir, tmp_path) -> dict[str, dict]:
    """Rows of different lengths in steps of 5, which two processes do not divide evenly."""
    told = [{"prompt": w, "response": w[::-1] * (1 + i % 3)} for i, w in enumerate(WORDS)]
    pairs = [{"prompt": w, "chosen": w + "x" * i, "rejected": w * 2} for i, w in enumerate(WORDS)]
    train = {"passes": 3, "minibatch_rows": 5, "microbatch_tokens": 40, "lr": 1e-2}
    common = {
        "threads": 1,
        "run": {"dir": str(tmp_path / "run")},
        "model": {"start": tiny_model_dir, "dtype": "float64"},
        "train": {**train, "eval_every": 2, "checkpoint_every": 2},
    }
    found = {}
    for command, rows in ("sft", told), ("reward_model", pairs):
        files = [write_rows(tmp_path / f"{command}-{n}.jsonl", rows[n:]) for n in (0, 4)]
        found[command] = {**common, "data": dict(zip(("train", "heldout"), files, strict=True))}
    return found


def train(command: str, config: dict, resume: bool = False) -> str:
    return str(getattr(api, command)(config, resume=resume).run)


def weights(run: str) -> dict:
    folder = max(Path(run).glob("checkpoints/0*"))
    files = [next(folder.glob("*/config.json")).with_name("model.safetensors")]
    files += [folder / f"{files[0].parent.name}_optimizer.safetensors"]
    return {f"{file.name} {k}": x for file in files for k, x in read_tensors(file).items()}


@few_or_many(
    ("command", "kind"),
    ("sft", "sharded"),
    ("reward_model", "sharded"),
)
def test_two_processes_with_parts_train_a_stage_as_one(configs, command, kind):
    assert_as_one(configs[command], command, kind)


@few_or_many(("command", "kind"), ("reward_model", "replicated"), ("sft", "replicated"))
def test_two_processes_train_a_stage_as_one(configs, command, kind):
    assert_as_one(configs[command], command, kind)


@pytest.mark.long
def test_two_processes_that_share_layers_train_a_stage_as_one(configs):
    assert_as_one(configs["sft"], "sft", "shared layers")


def assert_as_one(config: dict, command: str, kind: str) -> None:
    one = train(command, at(config, "one"))
    two, also = run_processes(2, train, command, at(config, "two", launch=LAUNCHES[kind]))
    assert two == also
    assert len(lines(one, "metrics.jsonl")) == 5  # 3 passes over 8 rows in steps of 5
    for name in ("metrics.jsonl", "evals.jsonl"):
        ours, theirs = lines(one, name), lines(two, name)
        for line in (*ours, *theirs):  # microbatches of other rows are padded otherwise
            line.pop("padding_share", None)
        assert difference(ours, theirs) < 1e-9
    a, b = weights(one), weights(two)
    assert a.keys() == b.keys()
    assert max(float((a[k] - b[k]).abs().max()) for k in a) < 1e-9


class Killer(Watcher[Any]):
    """Ends this process at once after the third step."""

    def iterated(self, record) -> None:
        if record.iteration == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(command: str, config: dict) -> None:
    rank = int(os.environ["RANK"])
    getattr(api, command)(config, Killer() if rank == 1 else Watcher())


@few_or_many(("command", "kind"), ("sft", "replicated"), ("reward_model", "sharded"))
def test_a_stage_that_was_killed_goes_on_to_the_same_bits(configs, command, kind):
    config = changed(configs[command], launch=LAUNCHES[kind], model__dtype="float32")
    whole, _ = run_processes(2, train, command, at(config, "whole"))
    with pytest.raises(AssertionError, match=r"a process died|cannot go on"):
        run_processes(2, train_until_killed, command, at(config, "killed"))
    run, _ = run_processes(2, train, command, at(config, "killed"), True)
    assert len(lines(run, "metrics.jsonl")) == 5
    for name in ("metrics.jsonl", "evals.jsonl"):
        assert (Path(run) / name).read_bytes() == (Path(whole) / name).read_bytes()
    saved = [
        path.relative_to(whole) for path in Path(whole, "checkpoints/000005").rglob("*.safetensors")
    ]
    assert len(saved) == 4
    for name in saved:
        assert Path(run, name).read_bytes() == Path(whole, name).read_bytes()
