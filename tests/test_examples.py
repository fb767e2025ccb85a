"""examples/: PPO in one file computes what the real loop computes, and learns."""

import copy
import importlib.util
import re
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
from ppo.test_iteration import nudge

from tether.ppo.iteration import run_iteration
from tether.ppo.result import Controls

PATH = Path(__file__).resolve().parent.parent / "examples" / "ppo_in_one_file.py"
ROWS = 12


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("ppo_in_one_file", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MINIBATCH_ROWS", ROWS)
    return module


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=0, atol=1e-6)


def as_rollout(rollout, example):
    """The real loop's rows as the example holds them."""
    prompt, response = rollout.prompt_ids.shape[1], rollout.response_ids.shape[1]
    prompts = torch.arange(prompt) >= prompt - rollout.prompt_lengths[:, None]
    responses = torch.arange(response) < rollout.response_lengths[:, None]
    return example.Rollout(
        torch.cat([rollout.prompt_ids, rollout.response_ids], dim=1),
        torch.cat([prompts, responses], dim=1),
        rollout.response_mask,
    )


def test_it_has_the_advantages_and_the_losses_of_the_real_loop(example, build, float64_norms):
    """Two optimizer steps on one batch, each on all rows, with both losses before each."""
    roles, config = build(
        model__dtype="float64",
        actor__entropy_coef=0.0,
        actor__lr=example.ACTOR_LR,
        critic__lr=example.CRITIC_LR,
        critic__clip=example.VALUE_CLIP,
        actor__epochs=example.EPOCHS,
        critic__epochs=example.EPOCHS,
        actor__minibatch_rows=ROWS,
        critic__minibatch_rows=ROWS,
    )
    nudge(roles.reference.policy.model)
    nudge(roles.critic, size=0.3)
    actor, reference = copy.deepcopy(roles.actor.model), roles.reference.policy.model
    critic = example.Critic(actor).double()
    critic.trunk.load_state_dict(roles.critic.trunk.state_dict())
    critic.head.load_state_dict(roles.critic.head.state_dict())

    outcome = run_iteration(0, Controls(beta=example.BETA, penalty_coef=0.0), roles, config)
    metrics = outcome.metrics(config)
    rollout = as_rollout(outcome.rollout, example)
    found = example.evaluate(rollout, outcome.scores.values, actor, reference, critic)
    for name in ("old_log_probs", "kl", "values", "returns", "policy_advantages"):
        assert same(getattr(found, name), getattr(outcome.experience, name)), name
    assert found.kl.abs().max() > 0.01
    assert found.policy_advantages.std() > 0.1

    optimizers = [
        torch.optim.AdamW(network.parameters(), lr, weight_decay=0.0)
        for network, lr in ((actor, example.ACTOR_LR), (critic, example.CRITIC_LR))
    ]
    batches = list(example.minibatches(found))
    assert len(batches) == 2
    policy = [example.step(example.actor_loss(actor, b), optimizers[0]) for b in batches]
    value = [example.step(example.critic_loss(critic, b), optimizers[1]) for b in batches]
    assert policy[1] < policy[0] - 1e-3  # the first is 0, as the ratio is 1
    assert fmean(policy) == pytest.approx(metrics["actor/pg_loss"], abs=1e-6)
    assert fmean(value) == pytest.approx(metrics["critic/vf_loss"], abs=1e-6)


def test_it_has_at_most_200_lines_and_nothing_of_the_real_loop():
    text = PATH.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    rooms = set(re.findall(r"^from tether\.(\w+)", text, re.MULTILINE))
    assert rooms == {"algo", "assets", "config"}


def test_as_a_script_it_prints_a_line_per_iteration(example, capsys):
    example.train(iterations=2, rows=ROWS)
    lines = capsys.readouterr().out.splitlines()
    number = r"[+-]?\d+\.\d+"
    pattern = rf"iteration  \d   score {number}   KL {number}   policy loss {number}   value loss "
    assert [bool(re.match(pattern, line)) for line in lines] == [True, True]
    assert "KL 0.000" in lines[0]  # the actor is the reference still
