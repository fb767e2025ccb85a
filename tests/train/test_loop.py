"""Whole runs on the tiny model: what they write, how they repeat, how they stop."""

import hashlib
import json
import math
import os
import pickle
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers import changed, configured, distinct_letters, read_jsonl

import tether
from tether.errors import RunStopped, UserError
from tether.models.loading import load_causal_lm
from tether.ppo.result import next_beta
from tether.ppo.roles import build_roles
from tether.ppo.scoring import score_rollout
from tether.ppo.updates import actor, critic
from tether.rollout.sampler import Greedy, single_turns
from tether.run.checkpoint_store import latest_checkpoint
from tether.train.watch import Watcher

REWARDS = """
def letters(response):
    return len(set(response)) / 8

def none(response):
    return None

def some(response):
    return 1.0 if ord(response[:1] or "a") % 4 else None
"""


@pytest.fixture
def reward_kind(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    return lambda name: f"{tmp_path}/rewards.py:{name}"


def files_of(directory) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def run(tiny_model_dir, tiny_data, tmp_path_factory):
    """One finished run of five iterations that several tests look at."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    config = {
        "threads": 1,
        "run": {"dir": str(directory), "rollouts_every": 2, "rollouts_rows": 4},
        "model": {"actor": tiny_model_dir},
        "data": {"train": tiny_data, "heldout": tiny_data},
        "rollout": {"prompts": 4, "samples_per_prompt": 2, "max_response_tokens": 6},
        "reward": {"kind": "exact_answer"},
        "actor": {"lr": 1e-3, "minibatch_rows": 8, "schedule": "linear"},
        "critic": {"lr": 1e-3, "minibatch_rows": 8},
        "train": {"iterations": 5, "eval_every": 2, "eval_prompts": 3, "checkpoint_every": 1},
    }
    return tether.train(config, reward=distinct_letters), configured(config)


def test_a_run_directory_holds_what_the_design_names(run):
    result, _ = run
    top = {"config.yaml", "metrics.jsonl", "timings.jsonl", "evals.jsonl", "events.jsonl"}
    top |= {"fingerprint.json", "prompts.jsonl"}
    files = files_of(result.run)
    assert {f for f in files if "/" not in f} == top | {"lock"}
    assert {f for f in files if f.startswith("rollouts/")} == {
        f"rollouts/00000{i}.jsonl" for i in (0, 2, 4)
    }
    assert sorted(p.name for p in (result.run / "checkpoints").iterdir()) == [
        "000004",
        "000005",
        "LATEST",
    ]


def test_every_line_and_file_says_its_schema(run):
    result, _ = run
    lines = [line for path in result.run.rglob("*.jsonl") for line in read_jsonl(path)]
    assert len(lines) > 20
    assert {line["schema"] for line in lines} == {1}
    assert yaml.safe_load((result.run / "config.yaml").read_text())["schema"] == 1
    assert json.loads((result.run / "fingerprint.json").read_text())["schema"] == 1
    for name in ("manifest.json", "state.json"):
        assert json.loads((latest_checkpoint(result.run) / name).read_text())["schema"] == 1


def test_metrics_have_the_names_that_people_plot(run):
    result, _ = run
    metrics, timings = (read_jsonl(result.run / f"{n}.jsonl") for n in ("metrics", "timings"))
    assert [line["iteration"] for line in metrics] == [0, 1, 2, 3, 4]
    assert [line["iteration"] for line in timings] == [0, 1, 2, 3, 4]
    actor = {"pg_loss", "pg_clipfrac", "entropy", "approx_kl", "grad_norm"}
    critic = {"vf_loss", "vf_clipfrac", "grad_norm", "explained_variance"}
    ours = {"score/mean", "kl/token_mean", "kl/sequence_mean", "kl/coef"}
    ours |= {"response/length_mean", "response/eos_rate"}
    wanted = {f"actor/{x}" for x in actor} | {f"critic/{x}" for x in critic} | ours
    assert all(wanted <= set(line) for line in metrics)
    assert all(line["actor/entropy"] >= 0 for line in metrics)  # Trap 15
    named = {"time/rollout", "time/update", "throughput/tokens_per_second"}
    assert all(named <= set(line) for line in timings)


def test_learning_rates_follow_the_schedule(run):
    rates = [line["actor/lr"] for line in read_jsonl(run[0].run / "metrics.jsonl")]
    assert rates == pytest.approx([1e-3, 8e-4, 6e-4, 4e-4, 2e-4])


def test_evaluations_come_before_after_and_every_so_often(run):
    evaluations = read_jsonl(run[0].run / "evals.jsonl")
    assert [line["iteration"] for line in evaluations] == [0, 2, 4, 5]
    assert {line["greedy"]["count"] for line in evaluations} == {3}
    assert run[0].before.iteration == 0
    assert run[0].after.iteration == 5


def test_a_rollout_row_holds_a_list_a_token_for_every_tensor(run):
    rows = read_jsonl(run[0].run / "rollouts" / "000002.jsonl")
    assert [row["row"] for row in rows] == [0, 1, 4, 5]
    tensors = {
        *("response_ids", "response_mask", "rollout_log_probs", "old_log_probs", "ref_log_probs"),
        *("new_log_probs", "kl", "values", "token_level_scores", "token_level_rewards"),
        *("advantages", "returns", "policy_advantages", "response_tokens"),
    }
    for row in rows:
        assert {len(row[name]) for name in tensors} == {len(row["response_ids"])}
        paid = zip(row["token_level_scores"], row["kl"], strict=True)
        rewards = [score - row["beta"] * kl for score, kl in paid]
        assert row["token_level_rewards"] == pytest.approx(rewards, abs=1e-6)
        assert sum(row["token_level_scores"]) == row["score"]
        moments = row["whitening"]
        whitened = [
            (a - moments["mean"]) / (moments["variance"] + 1e-8) ** 0.5 for a in row["advantages"]
        ]
        assert row["policy_advantages"] == pytest.approx(whitened, abs=1e-4)


def test_the_written_config_makes_the_same_run_again(run, tmp_path):
    """Byte for byte, though the first run began from a mapping."""
    result, _ = run
    config = tether.load_config(result.run / "config.yaml", {"run.dir": str(tmp_path / "again")})
    again = tether.train(config, reward=distinct_letters)
    for name in ("metrics.jsonl", "evals.jsonl", "config.yaml", "rollouts/000004.jsonl"):
        assert (again.run / name).read_bytes() == (result.run / name).read_bytes()
    for name in ("actor/model.safetensors", "critic.safetensors"):
        a, b = (latest_checkpoint(r) / name for r in (again.run, result.run))
        assert a.read_bytes() == b.read_bytes()


def test_another_seed_makes_another_run(run, tmp_path):
    result, _ = run
    overrides = {"run.dir": str(tmp_path / "other"), "seed": 1}
    other = tether.train(
        tether.load_config(result.run / "config.yaml", overrides), reward=distinct_letters
    )
    first, second = (r.run / "metrics.jsonl" for r in (result, other))
    assert first.read_bytes() != second.read_bytes()


def test_a_manifest_names_every_file_of_its_checkpoint_with_its_hash(run):
    place = latest_checkpoint(run[0].run)
    assert place.name == "000005"
    hashes = json.loads((place / "manifest.json").read_text())["sha256"]
    assert set(hashes) == files_of(place) - {"manifest.json"}
    for name, digest in hashes.items():
        assert hashlib.sha256((place / name).read_bytes()).hexdigest() == digest


def test_a_checkpointed_actor_is_a_hugging_face_directory_of_the_trained_weights(run):
    result, config = run
    last, before = (
        load_causal_lm(
            str(result.run / "checkpoints" / n / "actor"), "float32", torch.device("cpu")
        )
        for n in ("000005", "000004")
    )
    start = load_causal_lm(config.model.actor, "float32", torch.device("cpu"))
    vectors = [torch.nn.utils.parameters_to_vector(m.parameters()) for m in (last, before, start)]
    last, before, start = (vector.detach() for vector in vectors)
    assert 0 < float((last - before).norm()) < float((last - start).norm())


def test_a_run_directory_that_exists_is_refused_and_nothing_in_it_changes(run, tiny_config):
    result, _ = run
    before = {p: p.stat().st_mtime_ns for p in result.run.rglob("*")}
    with pytest.raises(UserError, match="exists"):
        tether.train(changed(tiny_config, run__dir=str(result.run)))
    assert {p: p.stat().st_mtime_ns for p in result.run.rglob("*")} == before


def test_a_mistake_in_the_config_leaves_an_earlier_run_alone(run, tiny_config):
    bad = changed(
        tiny_config, run__dir=str(run[0].run), run__overwrite=True, data__train="nowhere.jsonl"
    )
    with pytest.raises(UserError, match="nowhere"):
        tether.train(bad)
    assert (run[0].run / "metrics.jsonl").is_file()


def test_a_function_handed_over_is_used_in_place_of_the_rewards_kind(tiny_config):
    result = tether.train(
        changed(tiny_config, train__iterations=1), reward=lambda prompt: len(prompt) * 1.0
    )
    rows = read_jsonl(result.run / "rollouts" / "000000.jsonl")
    assert [row["score"] for row in rows] == [len(row["prompt"]) for row in rows]


def test_a_function_of_a_file_scores_in_the_child(tiny_config, reward_kind):
    result = tether.train(
        changed(tiny_config, reward__kind=reward_kind("letters"), train__iterations=1)
    )
    for row in read_jsonl(result.run / "rollouts" / "000000.jsonl"):
        assert row["score"] == pytest.approx(len(set(row["response"])) / 8)


def test_unscored_rows_are_named_in_the_events(tiny_config, reward_kind):
    """Trap 17."""
    config = changed(
        tiny_config,
        data__heldout=None,
        reward__kind=reward_kind("some"),
        reward__max_failed_share=1.0,
        train__iterations=1,
    )
    run = tether.train(config).run
    unscored = [
        row["row"] for row in read_jsonl(run / "rollouts" / "000000.jsonl") if row["score"] is None
    ]
    events = read_jsonl(run / "events.jsonl")
    assert unscored
    assert [event["row"] for event in events] == unscored
    assert {event["kind"] for event in events} == {"unscorable"}


def test_too_large_a_share_of_failures_stops_the_run(tiny_config, reward_kind):
    """Trap 17."""
    with pytest.raises(RunStopped, match=r"12 of 12 rows .*max_failed_share = 0.1.*None"):
        tether.train(changed(tiny_config, data__heldout=None, reward__kind=reward_kind("none")))


@pytest.mark.parametrize(("share", "stops"), [(2 / 12, False), (1.9 / 12, True)])
def test_a_share_of_failures_up_to_the_limit_is_borne(build, share, stops):
    """Trap 17: two rows of twelve."""
    calls = iter([None, 1.0, None, *[1.0] * 9])
    roles, config = build(lambda: next(calls), reward__max_failed_share=share)
    prompts = roles.train_prompts.first(12)
    roles.sampler.sync(roles.actor.model, 0)
    rollout = roles.sampler.run(single_turns(prompts), Greedy())
    if stops:
        with pytest.raises(RunStopped, match="2 of 12"):
            score_rollout(prompts, rollout, roles, config)
    else:
        scores, events = score_rollout(prompts, rollout, roles, config)
        assert (~scores.usable).nonzero().squeeze(1).tolist() == [0, 2]
        assert [event.row for event in events] == [0, 2]


def test_rows_that_an_evaluation_could_not_score_are_named_in_the_events(tiny_config, reward_kind):
    """Trap 17: an evaluation that silently leaves rows out looks like one that did not."""
    config = changed(
        tiny_config,
        reward__kind=reward_kind("some"),
        reward__max_failed_share=1.0,
        train__iterations=1,
    )
    run = tether.train(config).run
    before = read_jsonl(run / "evals.jsonl")[0]
    left_out = 2 * 18 - before["greedy"]["count"] - before["sampled"]["count"]
    assert left_out > 0
    assert len(read_jsonl(run / "events.jsonl")) > left_out


class Overflowing(torch.autograd.Function):
    """0, with an infinite gradient."""

    @staticmethod
    def forward(context, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(context, gradient):
        return torch.full_like(gradient, math.inf)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_gradients_that_overflow_cost_steps_and_not_the_run(tiny_config, monkeypatch, role):
    """The first microbatch of the run has an infinite gradient, and then none has."""
    module, name = {
        "actor": (actor, "policy_loss"),
        "critic": (critic, "clip_value_loss"),
    }[role]
    loss_of, factors = getattr(module, name), iter([math.inf])

    def overflowing(*arguments):
        loss = loss_of(*arguments)
        per_token = loss.per_token
        if next(factors, None):
            per_token = per_token + Overflowing.apply(per_token)
        return replace(loss, per_token=per_token)

    monkeypatch.setattr(module, name, overflowing)
    config = changed(tiny_config, data__heldout=None)
    run = tether.train(config, reward=distinct_letters).run
    [event] = read_jsonl(run / "events.jsonl")
    assert event["kind"] == "non_finite_gradient"
    assert role in event["message"]
    assert_finite(run)


def assert_finite(run) -> None:
    model = load_causal_lm(str(latest_checkpoint(run) / "actor"), "float32", torch.device("cpu"))
    assert all(p.isfinite().all() for p in model.parameters())
    for line in read_jsonl(run / "metrics.jsonl"):
        assert all(math.isfinite(x) for x in line.values())


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_score_that_is_taken_gives_no_nan_and_no_infinity(tiny_config, sign):
    """Its square is finite in float32, and so is every number made of it."""
    scores = iter([sign * 1e15, *[0.0] * 1000])
    run = tether.train(changed(tiny_config, data__heldout=None), reward=lambda: next(scores)).run
    assert read_jsonl(run / "events.jsonl") == []
    assert_finite(run)


@pytest.mark.parametrize("score", [1e39, -1e39, 1e30])
def test_a_score_that_float32_cannot_hold_or_square_is_an_unscored_row(tiny_config, score):
    """Trap 17: 1e39 is finite for Python and infinite for the tensors, as is 1e30 squared."""
    scores = iter([score, *[0.0] * 1000])
    config = changed(tiny_config, data__heldout=None, train__iterations=1)
    run = tether.train(config, reward=lambda: next(scores)).run
    [event] = read_jsonl(run / "events.jsonl")
    assert (event["kind"], event["row"]) == ("unscorable", 0)
    assert_finite(run)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_scoring_drops_the_iteration_and_saves_the_one_before(tiny_config, name):
    number = getattr(signal, name)
    calls = []

    def reward(response: str) -> float:
        calls.append(response)
        if len(calls) == 18:  # in the second iteration
            os.kill(os.getpid(), number)
        return 0.5

    config = changed(tiny_config, train__iterations=4, data__heldout=None)
    handler = signal.getsignal(number)
    result = tether.train(config, reward=reward)
    assert (result.interrupted, result.iterations_done) == (number, 1)
    assert latest_checkpoint(result.run).name == "000001"
    assert len(read_jsonl(result.run / "metrics.jsonl")) == 1
    assert signal.getsignal(number) is handler


def test_beta_moves_by_the_kl_of_the_unit_that_was_named(tiny_config):
    metrics = {"kl/token_mean": 0.9, "kl/sequence_mean": 13.2}
    adaptive = {"coef": 0.1, "controller": "adaptive", "horizon": 100}

    def steered(**section):
        return configured(tiny_config, kl__in_reward=section)

    by_token = steered(**adaptive, unit="token", target=1.0)
    by_sequence = steered(**adaptive, unit="sequence", target=12.0)
    assert next_beta(0.1, metrics, 50, by_token) == pytest.approx(0.1 * (1 - 0.1 * 0.5))
    assert next_beta(0.1, metrics, 50, by_sequence) == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    assert next_beta(0.1, metrics, 50, steered(coef=0.1)) == 0.1


def test_an_adaptive_beta_is_used_in_the_next_iteration(tiny_config):
    """KL 0 at iteration 0 lies far below its target: beta falls by a fifth of 12 rows in 48."""
    config = changed(
        tiny_config,
        kl__in_reward={"coef": 0.5, "controller": "adaptive", "horizon": 48},
        data__heldout=None,
    )
    run = tether.train(config, reward=distinct_letters).run
    betas = [line["kl/coef"] for line in read_jsonl(run / "metrics.jsonl")]
    assert betas == pytest.approx([0.5, 0.5 * (1 - 0.2 * 12 / 48)])


@pytest.mark.parametrize("which", ["data__train", "data__heldout"])
def test_a_prompt_that_leaves_no_room_in_the_context_is_refused_by_line(
    tiny_config, tmp_path, which
):
    data = tmp_path / "long.jsonl"
    rows = [{"prompt": "1+1=?", "answer": "2"}, {"prompt": "x" * 119, "answer": "2"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = changed(tiny_config, **{which: str(data)})
    with pytest.raises(UserError, match=r"long\.jsonl, line 2.*121 tokens.*room for 120"):
        build_roles(configured(config))
    build_roles(configured(config, rollout__max_response_tokens=7))


def test_check_trains_nothing_and_writes_nothing(tiny_config, tmp_path):
    plan = tether.check(tiny_config)
    assert plan.train_prompts == 18
    assert not (tmp_path / "run").exists()
    steps = {what: amount for what, amount, _ in plan.lines()}
    assert steps["rows per iteration"] == "12"
    assert steps["actor steps per iteration"] == "6"  # 2 epochs x ceil(12 / 5)


def test_an_ablation_is_named_in_an_event(tiny_config):
    wrong = {"estimator": "k3", "ablation": True}
    run = tether.train(changed(tiny_config, kl__in_reward=wrong, data__heldout=None)).run
    events = [e for e in read_jsonl(run / "events.jsonl") if e["kind"] == "ablation"]
    assert [e["message"].split()[0] for e in events] == ["kl.in_reward"]


def test_without_a_reference_there_is_nothing_to_refresh(tiny_config):
    kl = {"in_reward": {"coef": 0.0}, "refresh_reference_every": 1}
    config = changed(tiny_config, data__heldout=None, kl=kl)
    assert tether.train(config, reward=distinct_letters).iterations_done == 2


def test_a_policy_that_reads_nan_stops_the_run_even_under_stop_kl(tiny_config, monkeypatch):
    """A KL that is not a number must not pass for one that is too large."""
    loss_of = actor.policy_loss

    def spoiled(*arguments):
        loss = loss_of(*arguments)
        return replace(loss, per_token=loss.per_token * math.nan)

    monkeypatch.setattr(actor, "policy_loss", spoiled)
    config = changed(tiny_config, data__heldout=None, actor__stop_kl=5.0, train__iterations=8)
    with pytest.raises(RunStopped, match=r"3 iterations in a row taught nothing.*pg_loss"):
        tether.train(config, reward=distinct_letters)
    lines = read_jsonl(Path(config["run"]["dir"]) / "events.jsonl")
    assert {line["kind"] for line in lines} == {"non_finite_loss", "stopped"}
    assert len(read_jsonl(Path(config["run"]["dir"]) / "metrics.jsonl")) == 3


def test_a_watcher_is_told_a_small_record_with_one_sample(tiny_config):
    records = []

    class Listener(Watcher):
        def iterated(self, record):
            records.append(record)

    result = tether.train(tiny_config, reward=distinct_letters, watch=Listener())
    assert [record.iteration for record in records] == list(range(result.iterations_done))
    metrics = read_jsonl(result.run / "metrics.jsonl")[0]
    assert metrics == {"schema": 1, "iteration": 0, **records[0].metrics}
    sample = records[0].sample
    assert sample.score == distinct_letters(sample.response)
    assert all(len(pickle.dumps(record)) < 5_000 for record in records)
