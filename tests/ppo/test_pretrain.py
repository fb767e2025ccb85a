"""Value pretraining: the critic alone, to a stated explained variance, exact on resume."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers import changed, configured, distinct_letters, read_jsonl, table, tiny_recipe

import tether
from tether import api
from tether.errors import UserError
from tether.ppo.pretrain import pretrain_critic
from tether.ppo.roles import build_roles
from tether.run.checkpoint_store import latest_checkpoint


@pytest.fixture(scope="module")
def recipe(tiny_model_dir, tiny_data, tmp_path_factory):
    return changed(
        tiny_recipe(tiny_model_dir, tiny_data, tmp_path_factory.mktemp("pretrained") / "run"),
        train__eval_prompts=3,
        train__eval_every=0,
        critic__pretrain={"prompts": 8, "max_epochs": 3, "explained_variance": None},
        critic__lam=1.0,
        advantage__lam_alpha=0.5,
    )


@pytest.fixture(scope="module")
def config(tiny_model_dir, tmp_path_factory):
    """Sixteen prompts; those of a worth 0 and of b worth 1, whatever the response."""
    folder = tmp_path_factory.mktemp("letters")
    lines = [{"prompt": "ab"[i % 2] * 8 + str(i), "answer": str(i % 2)} for i in range(16)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return configured(
        tiny_recipe(tiny_model_dir, str(folder / "data.jsonl"), folder / "run"),
        rollout__max_response_tokens=2,
        critic__minibatch_rows=8,
        critic__pretrain={"prompts": 16, "max_epochs": 8, "explained_variance": None},
    )


def by_prompt(answer: str) -> float:
    return float(answer)


@pytest.fixture
def roles(config):
    return build_roles(config, by_prompt)


def copied(weights):
    return {name: weight.detach().clone() for name, weight in weights.items()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_only_the_critic_learns_and_held_back_returns_are_explained_better(config, roles):
    actor, critic = copied(roles.actor.model.state_dict()), copied(roles.critic.state())
    found = pretrain_critic(config.critic.pretrain, 0.0, roles, config)
    assert same(actor, roles.actor.model.state_dict())
    assert not same(critic, copied(roles.critic.state()))
    assert found.rows == 24  # of 16 prompts x 2, a quarter held back
    assert len(found.explained_variances) == 8
    assert found.explained_variances[-1] > 0.5 > found.explained_variances[0]


def test_it_stops_at_the_stated_share(config, roles):
    settings = config.critic.pretrain.model_copy(update={"explained_variance": 0.3})
    found = pretrain_critic(settings, 0.0, roles, config).explained_variances
    assert 1 < len(found) < 8
    assert found[-1] >= 0.3 > max(found[:-1])


def test_an_interruption_leaves_the_critic_as_it_was(config, roles, monkeypatch):
    critic = copied(roles.critic.state())
    monkeypatch.setattr("tether.ppo.pretrain.explained_variance", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pretrain_critic(config.critic.pretrain, 0.0, roles, config)
    assert same(critic, roles.critic.state())
    assert roles.critic_optimizer.state() == {}


def test_one_prompt_cannot_be_split(config, roles):
    ids = roles.train_prompts.prompts.ids
    ids[:] = [ids[0]] * len(ids)
    with pytest.raises(UserError, match=r"critic\.pretrain needs two different prompts"):
        pretrain_critic(config.critic.pretrain, 0.0, roles, config)


ASKS = """
class Asks:
    def reset(self, row):
        return "ab"[row["seed"] % 2] * 3 + str(row["seed"])

    def step(self, response):
        return "", 1.0, True, False, {}
"""


def test_an_environment_says_the_prompts_that_the_critic_learns_on(tiny_model_dir, tmp_path):
    (tmp_path / "asks.py").write_text(ASKS)
    config = configured(
        tiny_recipe(tiny_model_dir, "environment", tmp_path / "run"),
        data__train=[{"path": "environment", "arguments": {"size": 8}}],
        data__heldout=None,
        rollout__max_response_tokens=10,
        rollout__max_observation_tokens=8,
        rollout__environment={"kind": f"{tmp_path}/asks.py:Asks"},
        reward__kind="environment",
        critic__pretrain={"prompts": 8, "max_epochs": 1, "explained_variance": None},
    )
    roles = build_roles(config, None)
    found = pretrain_critic(config.critic.pretrain, 0.0, roles, config)
    assert 0 < found.rows < 8 * config.rollout.samples_per_prompt


def signalling(call: int):
    """A reward in whose n-th call a SIGTERM arrives."""
    seen = []

    def reward(response: str) -> float:
        seen.append(response)
        if len(seen) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return distinct_letters(response)

    return reward


@pytest.fixture(scope="module")
def uninterrupted(recipe):
    run = Path(recipe["run"]["dir"])
    tether.train(recipe, reward=distinct_letters)
    return run.rename(run.with_name("uninterrupted"))


@table("call", [6 + 3, 6 + 16 + 3, 6 + 16 + 12 + 3])
def test_a_run_interrupted_anywhere_goes_on_to_the_same_bits(recipe, uninterrupted, call):
    """After 6 held-out scores: in the bank's, in the first iteration's, in the second's."""
    run = Path(recipe["run"]["dir"])
    shutil.rmtree(run, ignore_errors=True)
    result = tether.train(recipe, reward=signalling(call))
    assert result.interrupted == signal.SIGTERM
    api.resume(str(run), reward=distinct_letters)
    assert (run / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    for name in ("critic.safetensors", "critic_optimizer.safetensors", "actor/model.safetensors"):
        ours, theirs = (latest_checkpoint(x) / name for x in (run, uninterrupted))
        assert ours.read_bytes() == theirs.read_bytes()


def test_the_first_line_of_the_metrics_says_how_far_it_came(uninterrupted):
    first, second = read_jsonl(uninterrupted / "metrics.jsonl")
    assert first["critic/pretrain_epochs"] == 3
    assert "critic/pretrain_epochs" not in second
    events = read_jsonl(uninterrupted / "events.jsonl")
    assert [e["iteration"] for e in events if e["kind"] == "pretrained"] == [0]
