"""One loop on several processes: the numbers of one, whatever their count."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from helpers import changed, few_or_many, first_or_all

from dist.processes import run_processes
from tether import api
from tether.dist.world import world
from tether.rollout.local import LocalSampler
from tether.train.checkpoint_files import read_tensors
from tether.types import Rollout

GRPO = {"advantage__estimator": "grpo", "critic": {}, "actor__aggregation": "seq_mean_token_sum"}
KINDS = {
    "clip": {"actor__entropy_coef": 0.01},
    "penalty": {"actor__update": {"kind": "penalty"}},
    "grpo": GRPO | {"kl__in_loss": {"coef": 0.1}},
    "trpo": {"actor__update": {"kind": "trpo"}},
}


def letters(response: str) -> float:
    """A reward that differs from row to row."""
    return len(set(response)) / 8


def train(config: dict, resume: bool = False) -> str:
    return str(api.train(config, reward=letters, resume=resume).run)


@pytest.fixture
def ragged(tiny_config) -> dict:
    """15 rows an iteration, of different lengths, in minibatches of 4: nothing divides evenly."""
    return changed(
        tiny_config,
        model__dtype="float64",
        rollout={"prompts": 5, "samples_per_prompt": 3, "max_response_tokens": 12},
        actor__minibatch_rows=4,
        actor__microbatch_tokens=40,
        critic__minibatch_rows=4,
        critic__microbatch_tokens=40,
        train={"iterations": 2, "eval_prompts": 4},
        advantage={"estimator": "gae"},
    )


def at(config: dict, name: str, **dotted) -> dict:
    return changed(config, run__dir=str(Path(config["run"]["dir"]).with_name(name)), **dotted)


def lines(run: str, name: str) -> list[dict]:
    return [json.loads(line) for line in (Path(run) / name).read_text().splitlines()]


def difference(a: object, b: object) -> float:
    """The largest one between two JSON values of one shape."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return max((difference(a[k], b[k]) for k in a if k != "messages"), default=0.0)
    if isinstance(a, list):
        assert len(a) == len(b)
        return max(map(difference, a, b), default=0.0)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) / max(1.0, abs(a))
    assert a == b
    return 0.0


def assert_same(one: str, other: str, tolerance: float, iterations: int | None = None) -> None:
    for name in ("metrics.jsonl", "evals.jsonl"):
        a, b = (lines(run, name)[:iterations] for run in (one, other))
        assert len(a) == len(b) > 0
        assert difference(a, b) < tolerance


@pytest.mark.parametrize("kind", first_or_all(KINDS))
def test_two_processes_train_as_one(ragged, kind):
    config = changed(ragged, **KINDS[kind])
    [one] = run_processes(1, train, at(config, "one"))
    two, also_two = run_processes(2, train, at(config, "two"))
    assert two == also_two
    assert_same(one, two, 1e-9)
    for file in ("rollouts/000000.jsonl", "rollouts/000001.jsonl"):
        assert difference(lines(one, file), lines(two, file)) < 1e-6  # written as float32
    a, b = (_weights(run) for run in (one, two))
    assert a.keys() == b.keys()
    assert max(float((a[k] - b[k]).abs().max()) for k in a) < 1e-9


IN_THREE = {
    "shared trunk": {"critic": {"shared_trunk": True}},
    "lora": {"model__lora": {"rank": 2}, "model__critic_lora": {"rank": 2}},
    "remax": {"advantage__estimator": "remax", "critic": {}},
    "stop_kl": {"actor__stop_kl": 1e-5},
    "full kl, refreshed": {
        "kl__in_loss": {"coef": 0.1, "estimator": "full"},
        "kl__refresh_reference_every": 2,
    },
    "gspo, reused": {"actor__update": {"kind": "gspo"}, "rollout__reuse_log_probs": True},
    "frozen layers": {"model__learn_layers": 1, "kl__refresh_reference_every": 1},
}


@pytest.mark.long
@pytest.mark.parametrize("change", IN_THREE)
def test_three_processes_train_as_one(ragged, change):
    config = changed(ragged, **IN_THREE[change])
    [one] = run_processes(1, train, at(config, "one"))
    three, *_ = run_processes(3, train, at(config, "three"))
    assert_same(one, three, 1e-9)


@pytest.mark.long
def test_more_processes_than_rows_of_a_minibatch(ragged):
    config = changed(ragged, actor__minibatch_rows=3, critic__minibatch_rows=3, train__iterations=1)
    [one] = run_processes(1, train, at(config, "one"))
    four, *_ = run_processes(4, train, at(config, "four"))
    assert_same(one, four, 1e-9)


@few_or_many(("before", "after"), (2, 1), (1, 3))
def test_a_run_goes_on_with_another_number_of_processes(ragged, before, after):
    short = at(ragged, "resumed", train__iterations=1)
    [whole] = run_processes(1, train, at(ragged, "whole"))
    run, *_ = run_processes(before, train, short)
    parts = sorted(path.name for path in Path(run).glob("checkpoints/000001/critic[-.]*"))
    assert len(parts) == before
    run_processes(after, train, at(ragged, "resumed"), True)
    a, b = (lines(run, "metrics.jsonl") for run in (whole, run))
    assert len(a) == len(b) == 2
    assert difference(a, b) < 1e-9


def test_a_checkpoint_in_parts_is_a_model_for_everyone(ragged):
    run, _ = run_processes(2, train, ragged)
    folder = Path(run) / "checkpoints/000002"
    assert len(list(folder.glob("actor/model-*.safetensors"))) == 2
    model, _ = api.load_plain(run)
    weights = _weights(run)
    for name, weight in model.named_parameters():
        assert torch.equal(weight.double(), weights[name].float().double())
    api.generate("1+1=?", run, max_tokens=2)


@pytest.mark.long
def test_float32_agrees_at_once_and_on_replayed_rollouts(ragged, tmp_path):
    config = changed(ragged, model__dtype="float32", train__iterations=5, actor__lr=3e-4)
    [one] = run_processes(1, _train_recorded, at(config, "one"), str(tmp_path / "recorded"))
    two, _ = run_processes(2, train, at(config, "two"))
    assert difference(lines(one, "metrics.jsonl")[0], lines(two, "metrics.jsonl")[0]) < 1e-5
    again, _ = run_processes(2, _train_replayed, at(config, "again"), str(tmp_path / "recorded"))
    assert_same(one, again, 1e-4)


LAYOUTS = {
    "replicated": {"weights": "replicated"},
    "sharded": {"weights": "sharded"},
    "shared layers": {"weights": "sharded", "tensor_parallel": 2},
}


@few_or_many("layouts", ("sharded",), ("replicated", "shared layers"))
def test_in_bfloat16_losses_differ_by_its_rounding(ragged, tmp_path, layouts):
    """On the same rollouts, one process against two: losses by less than 0.01, norms by 5%.

    With shared layers by 10%: each process rounds its part of a product before the parts are added.
    """
    config = changed(ragged, model__dtype="float32", model__compute="bfloat16", actor__lr=3e-4)
    [one] = run_processes(1, _train_recorded, at(config, "one"), str(tmp_path / "recorded"))
    for name in layouts:
        shared = at(config, name, launch=LAYOUTS[name])
        two, _ = run_processes(2, _train_replayed, shared, str(tmp_path / "recorded"))
        for a, b in zip(lines(one, "metrics.jsonl"), lines(two, "metrics.jsonl"), strict=True):
            for metric in ("actor/pg_loss", "critic/vf_loss", "actor/approx_kl", "kl/token_mean"):
                assert abs(a[metric] - b[metric]) < 0.01, (name, metric)
            for metric in ("actor/grad_norm", "critic/grad_norm"):
                bound = 0.10 if name == "shared layers" else 0.05
                assert abs(a[metric] / b[metric] - 1) < bound, (name, metric)


def _train_recorded(config: dict, folder: str) -> str:
    """Keep what the sampler returned, call by call."""
    Path(folder).mkdir()
    sample, calls = LocalSampler.run, iter(range(10_000))

    def record(self, *arguments) -> Rollout:
        rollout = sample(self, *arguments)
        (Path(folder) / f"{next(calls)}.pickle").write_bytes(pickle.dumps(rollout))
        return rollout

    LocalSampler.run = record
    return train(config)


def _train_replayed(config: dict, folder: str) -> str:
    """Each process returns its rows of what was kept."""
    calls = iter(range(10_000))

    def replay(self, episodes, choice, numbers) -> Rollout:
        kept = pickle.loads((Path(folder) / f"{next(calls)}.pickle").read_bytes())
        rows = list(numbers)
        tensors = {
            name: value[rows] for name, value in vars(kept).items() if torch.is_tensor(value)
        }
        return Rollout(**tensors, finish_reasons=tuple(kept.finish_reasons[i] for i in rows))

    LocalSampler.run = replay
    return train(config)


def test_an_error_of_the_first_is_everyones(tiny_config):
    Path(tiny_config["run"]["dir"]).mkdir()
    (Path(tiny_config["run"]["dir"]) / "mine.txt").write_text("mine")
    said = run_processes(2, _complaint, tiny_config)
    assert said[0] == said[1]
    assert "exists and is not a run" in said[0]


def test_a_reward_that_fails_on_one_process_is_named_by_all(tiny_config):
    said = run_processes(2, _complaint, changed(tiny_config, reward__kind="/nowhere.py:score"))
    assert said[0] == said[1]
    assert "nowhere.py" in said[0]


def _complaint(config: dict) -> str:
    try:
        api.train(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_processes_that_do_not_fit_are_refused(tiny_config):
    [text, _] = run_processes(2, _complaint, changed(tiny_config, launch={"num_workers": 3}))
    assert "launch.num_workers is 3, but only 2 processes are running" in text
    few = changed(tiny_config, rollout={"prompts": 1, "samples_per_prompt": 1}, actor={}, critic={})
    few |= {"actor": {"minibatch_rows": 1}, "critic": {"minibatch_rows": 1}}
    [text, _] = run_processes(2, _complaint, few)
    assert "1 rows, too few for 2 processes" in text


def test_alone_nothing_is_joined(tiny_config):
    assert run_processes(1, _size, tiny_config) == [1]


def _size(config: dict) -> int:
    return world().size


def _weights(run: str) -> dict:
    folder = max(Path(run).glob("checkpoints/0*"))
    return read_tensors(folder / "actor" / "model.safetensors")
