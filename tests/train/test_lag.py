"""`rollout.lag`: rows of older weights, repeatable and resumable to the bit."""

import hashlib
import json
import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from helpers import Stop, changed, configured, distinct_letters, read_jsonl, stopping, table

import tether
from tether import api
from tether.config.load import validate_config
from tether.errors import UserError
from tether.ppo.ahead import Ahead, pending_state, pending_tensors
from tether.ppo.result import sampling_version
from tether.ppo.sampling import Batch
from tether.run.checkpoint_store import all_checkpoints
from tether.run.metrics import Event
from tether.train.checkpoint import read_state
from tether.types import Call, Rollout, Scores


@pytest.fixture
def config(tiny_config) -> dict:
    return changed(
        tiny_config,
        rollout__lag=2,
        train={"iterations": 5, "eval_every": 2, "eval_prompts": 3, "checkpoint_every": 2},
        run__rollouts_every=1,
    )


def files(run: Path) -> dict[str, str]:
    """Hashes of what a run must repeat to the bit."""
    names = [*run.glob("*s.jsonl"), *run.glob("rollouts/*"), *run.glob("checkpoints/*/**/*.saf*")]
    found = {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in names}
    for name in ("events.jsonl", "timings.jsonl"):
        found.pop(name, None)
    assert len(found) > 8
    return found


@table(
    ("iteration", "lag", "version"),
    [(0, 0, 0), (7, 0, 7), (0, 1, 0), (1, 1, 0), (2, 1, 1), (1, 4, 0), (4, 4, 0), (9, 4, 5)],
)
def test_the_version_follows_from_the_lag_alone(iteration, lag, version):
    assert sampling_version(iteration, lag) == version


class Recording:
    """A sampler that remembers the weights of each batch that is trained on."""

    def __init__(self, sampler) -> None:
        self.sampler, self.versions, self.sums = sampler, {}, {}

    def sync(self, weights, version) -> None:
        self.weights, self.version = weights, version
        self.sampler.sync(weights, version)

    def run(self, episodes, choice, numbers=None):
        if getattr(choice, "purpose", None) == "token":
            self.versions[choice.iteration] = self.version
            self.sums[choice.iteration] = weight_sum(self.weights)
        return self.sampler.run(episodes, choice, numbers)


def weight_sum(model) -> float:
    return float(sum(w.detach().double().abs().sum() for w in model.parameters()))


def test_each_iteration_learns_from_rows_of_the_weights_lag_iterations_ago(config, monkeypatch):
    from tether.train import ppo

    built, after = [], []
    build_roles, run_iteration = ppo.build_roles, ppo.run_iteration

    def recording(*arguments):
        roles = build_roles(*arguments)
        built.append(Recording(roles.sampler))
        return ppo.replace(roles, sampler=built[-1])

    def noting(iteration, controls, roles, *arguments):
        after.append(weight_sum(roles.actor.model))  # of version `iteration`
        return run_iteration(iteration, controls, roles, *arguments)

    monkeypatch.setattr(ppo, "build_roles", recording)
    monkeypatch.setattr(ppo, "run_iteration", noting)
    result = tether.train(config, reward=distinct_letters)
    [sampler] = built
    assert sampler.versions == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2}
    assert len(set(after)) == 5
    assert [sampler.sums[i] for i in range(5)] == [after[v] for v in (0, 0, 0, 1, 2)]
    assert [m["rollout/lag"] for m in read_jsonl(result.run / "metrics.jsonl")] == [0, 1, 2, 2, 2]


def test_the_first_iterations_numbers_say_whose_the_old_log_probs_are(config):
    """In iteration 0 sampler and trainer have the same weights, later they have not: the weights
    of the loss are the capped ratio of the recorded log-probs."""
    run = tether.train(config, reward=distinct_letters).run
    metrics = read_jsonl(run / "metrics.jsonl")
    assert (
        metrics[0]["rollout/log_prob_diff_mean"]
        < 1e-5
        < 1e-3
        < min(m["rollout/log_prob_diff_mean"] for m in metrics[1:])
    )
    for row in read_jsonl(run / "rollouts/000003.jsonl"):
        columns = (row[k] for k in ("correction_weights", "old_log_probs", "rollout_log_probs"))
        for weight, old, sampled in zip(*columns, strict=True):
            assert weight == pytest.approx(min(math.exp(old - sampled), 2.0), abs=1e-5)


def test_a_lagged_run_repeats_and_resumes_to_the_same_bits(config, tmp_path):
    whole = tether.train(changed(config, run__dir=str(tmp_path / "whole")), reward=distinct_letters)
    again = tether.train(changed(config, run__dir=str(tmp_path / "again")), reward=distinct_letters)
    assert files(whole.run) == files(again.run)
    # Scored so far: two evaluations of 6 rows and three batches of 12 at the checkpoint after two
    # iterations, whose pending ones are scored for it. It ends in the second iteration after it.
    with pytest.raises(Stop):
        tether.train(config, reward=stopping(2 * 6 + 4 * 12 + 5))
    run = Path(config["run"]["dir"])
    assert [c.name for c in all_checkpoints(run)] == ["000002"]
    pending = read_state(run / "checkpoints/000002")["pending"]
    assert [*pending] == ["2", "3"]
    resumed = api.resume(run, reward=distinct_letters)
    assert (resumed.resumed_from, resumed.iterations_done) == (2, 5)
    assert files(run) == files(whole.run)


def test_what_waits_is_what_the_checkpoint_says_it_is(config, tmp_path):
    """Rows lost from a checkpoint would change the run: they are of weights that are gone."""
    from safetensors.torch import load_file

    run = tether.train(changed(config, train__iterations=4), reward=distinct_letters).run
    held = load_file(run / "checkpoints/000002/pending.safetensors")
    logged = read_jsonl(run / "rollouts/000003.jsonl")
    ids, lengths = held["3.response_ids"], held["3.response_lengths"]
    assert len(logged) == len(ids) == 12
    for row, line in enumerate(logged):
        assert ids[row, : lengths[row]].tolist() == line["response_ids"]
        assert float(held["3.values"][row]) == pytest.approx(line["score"])
    assert load_file(run / "checkpoints/000004/pending.safetensors") == {}


def test_lag_0_has_no_trace_of_it(config):
    run = tether.train(changed(config, rollout__lag=0), reward=distinct_letters).run
    assert "rollout/lag" not in read_jsonl(run / "metrics.jsonl")[-1]
    assert not list(run.glob("checkpoints/*/pending.safetensors"))
    assert "pending" not in read_state(all_checkpoints(run)[0])


def test_more_iterations_are_refused_once_rows_were_asked_for_ahead(config):
    from tether.train.resume import changed_fields

    lagged = configured(config)
    longer = lagged.model_copy(update={"train": lagged.train.model_copy(update={"iterations": 9})})
    assert changed_fields(lagged.to_dict(), longer) == ["train.iterations, 5 then and 9 now"]


@table(
    ("fields", "named"),
    [
        ({"rollout__dynamic_sampling": {}}, r"rollout\.dynamic_sampling does not go with"),
        ({"data__curriculum": {"by": "difficulty"}}, r"data\.curriculum does not go with"),
        ({"rollout__reuse_log_probs": True}, r"reuse_log_probs does not go with rollout\.lag = 2"),
        ({"rollout__environment": "a.py:make"}, r"rollout\.environment does not go with"),
        ({"actor__update": {"kind": "trpo"}}, r"actor\.update\.kind trpo does not go with"),
        ({"launch__num_workers": 2}, r"several launch\.num_workers does not go with"),
        (
            {"actor__update": {"kind": "reinforce"}, "rollout__correction": {"kind": "none"}},
            r"reinforce has no ratio.*rollout\.correction\.kind: token",
        ),
        ({"rollout__lag": -1}, r"rollout\.lag"),
    ],
)
def test_what_needs_rows_of_the_newest_weights_is_refused_by_field(config, fields, named):
    with pytest.raises(UserError, match=named):
        validate_config(changed(config, rollout__max_response_tokens=200, **fields))


def test_the_correction_is_on_unless_it_is_turned_off(config):
    assert configured(config).correction.kind == "token"
    off = configured(config, rollout__correction={"kind": "none"})
    assert (off.correction.kind, off.may_mismatch) == ("none", True)
    assert configured(config, rollout__lag=0).correction.kind == "none"
    reinforce = configured(config, actor__update={"kind": "reinforce"})
    assert reinforce.correction.kind == "token"


def test_calls_extras_and_token_scores_survive_a_checkpoint(build):
    roles, config = build(rollout__lag=1)
    rollout = Rollout(
        prompt_ids=torch.tensor([[1, 2], [1, 2]]),
        prompt_lengths=torch.tensor([2, 2]),
        response_ids=torch.tensor([[3, 4, 5], [6, 0, 0]]),
        response_lengths=torch.tensor([3, 1]),
        response_mask=torch.tensor([[True, False, True], [True, False, False]]),
        rollout_log_probs=torch.tensor([[-0.5, 0.0, -1.5], [-2.0, 0.0, 0.0]]),
        finish_reasons=("eos", "length"),
        calls=((Call(0, "search", "q", "found", 0.25, fault="tool", error="late"),), ()),
    )
    scores = Scores(
        values=torch.tensor([1.5, 0.0]),
        usable=torch.tensor([True, False]),
        scored=torch.tensor([True, False]),
        parts={"a.b": torch.tensor([0.5, 0.0])},
        extras={1: {"answer": "7"}},
        token_values=torch.tensor([[0.5, 0.0, 1.0], [0.0, 0.0, 0.0]]),
    )
    batch = Batch(roles.train_prompts.first(2), rollout, scores, [Event("unscorable", "why", 1)])
    state = json.loads(json.dumps(pending_state({3: batch})))
    ahead = Ahead()
    ahead.load(state, pending_tensors({3: batch}), roles, config)
    found = ahead.waiting[3]
    for kind, name in [
        (x, f.name) for x in ("rollout", "scores") for f in fields(getattr(batch, x))
    ]:
        then, now = getattr(getattr(batch, kind), name), getattr(getattr(found, kind), name)
        assert torch.equal(then, now) if isinstance(then, torch.Tensor) else str(then) == str(now)
    assert found.events == batch.events
    window = roles.train_prompts.window(18, 6, config.seed, True).ids
    assert found.prompts.ids == [ids for ids in window for _ in range(2)]
