"""examples/classic_control.py: its settings, its advantages, and a short run of it."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).resolve().parent.parent / "examples" / "classic_control.py"


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("gymnasium", reason="gymnasium is in the extra `yardsticks`")
    spec = importlib.util.spec_from_file_location("classic_control", PATH)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_it_has_at_most_150_lines():
    assert len(PATH.read_text(encoding="utf-8").splitlines()) <= 150


def test_its_settings_are_those_of_cleanrl(example):
    """vwxyzjn/cleanrl fe8d8a0, the defaults of cleanrl/ppo.py."""
    assert vars(example.Settings()) == {
        "steps": 500_000,
        "envs": 4,
        "rollout_steps": 128,
        "lr": 2.5e-4,
        "adam_eps": 1e-5,
        "gamma": 0.99,
        "lam": 0.95,
        "minibatches": 4,
        "epochs": 4,
        "clip": 0.2,
        "entropy_coef": 0.01,
        "value_coef": 0.5,
        "max_grad_norm": 0.5,
        "width": 64,
    }


def test_episodes_in_one_rollout_do_not_see_each_other(example):
    """Against a loop that runs over the steps and stops at every end."""
    torch.manual_seed(0)
    rewards, values, after = torch.randn(3, 7), torch.randn(3, 7), torch.randn(3)
    ends = torch.tensor([[0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1], [0] * 7], dtype=torch.bool)
    expected = torch.zeros(3, 7)
    for i in range(3):
        next_value, next_advantage = after[i], torch.tensor(0.0)
        for t in reversed(range(7)):
            if ends[i, t]:
                next_value = next_advantage = torch.tensor(0.0)
            delta = rewards[i, t] + 0.9 * next_value - values[i, t]
            next_advantage = expected[i, t] = delta + 0.9 * 0.8 * next_advantage
            next_value = values[i, t]
    found = example.advantages_of(rewards, values, ends, after, gamma=0.9, lam=0.8)
    torch.testing.assert_close(found, expected)


def test_it_trains_and_the_same_seed_gives_the_same_episodes(example):
    settings = example.Settings(steps=2048)
    episodes = example.train("CartPole-v1", 3, settings)
    assert episodes == example.train("CartPole-v1", 3, settings)
    assert len(episodes) > 20
    assert episodes[-1][0] <= 2048
    assert sum(length for _, length in episodes) <= 2048  # a reward of 1 per step
    assert 8 <= example.score_of(episodes) <= 500


def test_the_score_is_the_mean_of_the_last_hundred_episodes(example):
    assert example.score_of([(i, float(i)) for i in range(300)]) == (200 + 299) / 2


def test_a_task_without_discrete_actions_is_named(example):
    with pytest.raises(SystemExit, match="Pendulum-v1 has no discrete actions"):
        example.train("Pendulum-v1", 1, example.Settings(steps=512))
