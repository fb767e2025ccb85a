"""A text environment of Gymnasium's, by its signature, with the package's own wrappers."""

import pytest

from rollout.talk import say, settings, vocabulary
from tether.config import DataSection
from tether.rollout.sampler import Done
from tether.rollout.tools.build import build_episode_source
from tether.types import Prompts

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")

WORLD = """
import gymnasium
from gymnasium import spaces

class Count(gymnasium.Env):
    observation_space = spaces.Text(40)
    action_space = spaces.Text(10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(10, 99))
        return f"Count on from {self.number}.", {}

    def step(self, action):
        right = action == str(self.number + 1)
        self.number += 1
        return ("yes" if right else "no"), float(right), False, False, {}

def make(limit=3):
    return gymnasium.wrappers.TimeLimit(Count(), limit)
"""


def test_a_gymnasium_environment_runs_as_it_is(tmp_path, byte_tokenizer):
    path = tmp_path / "counting.py"
    path.write_text(WORLD)
    section = settings(tools=[], environment=f"{path}:make", max_turns=9)
    data = DataSection(train="environment")
    prompts = Prompts([""], [[]], [{"seed": 11}], [0], [""], [None])
    source = build_episode_source(section, vocabulary(byte_tokenizer), data)
    [row] = source.episodes(prompts)

    names: dict = {}
    exec(WORLD, names)
    env = names["make"]()
    said, _ = env.reset(seed=11)
    assert byte_tokenizer.decode(row.prompt_ids) == f"<|user|>{said}<|assistant|>"
    number, rewards = env.unwrapped.number, []
    for action in (str(number + 1), "x"):
        observation, reward, *_ = env.step(action)
        rewards.append(reward)
        assert say(row, f"{action}<|end|>") == f"<|user|>{observation}<|assistant|>"
    *_, reward, terminated, truncated, _ = env.step(str(number + 3))
    assert (terminated, truncated) == (False, True)
    for token in byte_tokenizer(f"{number + 3}<|end|>").input_ids:
        row.add_token(token)
    assert row.answer() == Done("truncated")
    assert row.turn_rewards == (*rewards, reward)
