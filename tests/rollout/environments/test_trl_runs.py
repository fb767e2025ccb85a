"""Whole runs with TRL's environment classes: rows of a file, of the class itself, and bad ones."""

import json

import pytest
from helpers import read_jsonl

import tether
from tether.errors import RunStopped, UserError

CLASSES = '''
class Increment:
    """Rewarded by what the row says; a policy that calls nothing leaves the counter at 0."""

    def reset(self, target=4, **kwargs):
        if target == 3:
            raise RuntimeError("no three")
        self.counter, self.target, self.reward = 0, target, target / 10
        return None if "prompt" in kwargs else f"{target}+1=?"

    def increment(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: Value to add.

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter

    def get_reward(self) -> float:
        return 1.0 - self.target / 10


def reward_func(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]


class Silent(Increment):
    get_reward = None


async def async_reward(prompts, completions, **kwargs):
    return [0.0 for _ in completions]
'''


@pytest.fixture
def train(tmp_path):
    (tmp_path / "my_env.py").write_text(CLASSES)

    def run(targets=(1, 2, 4, 5), reward=None, name="Increment", share=1.0, **fields):
        rows = [{"prompt": [{"role": "user", "content": f"{t}+1=?"}], "target": t} for t in targets]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        arguments = {"class": f"{tmp_path}/my_env.py:{name}"}
        config = {
            "model": {"actor": "tether:starter"},
            "data": {"train": str(tmp_path / "rows.jsonl"), "shuffle": False},
            "rollout": {
                "environment": {"kind": "trl", "arguments": arguments},
                "prompts": 4, "samples_per_prompt": 1, "max_turns": 2,
                "max_response_tokens": 40, "max_observation_tokens": 24, "max_failed_share": share,
            },
            "reward": {**(reward or {"kind": "environment"}), "max_failed_share": share},
            "actor": {"minibatch_rows": 4},
            "run": {"dir": str(tmp_path / "run"), "rollouts_every": 1},
            "train": {"iterations": 1},
            "threads": 1,
            **fields,
        }  # fmt: skip
        tether.train(config)
        [path] = (tmp_path / "run" / "rollouts").glob("*.jsonl")
        return read_jsonl(path)

    return run


def part(name, kind, weight=1.0):
    return {"name": name, "kind": kind, "weight": weight}


def test_rows_of_a_file_reach_reset_and_all_rewards_are_summed(train, tmp_path):
    """0.9 + 2 x 0.1 for target 1, and so on; the async one adds nothing."""
    own = f"{tmp_path}/my_env.py"
    parts = [
        part("own", "environment"),
        part("read", f"{own}:reward_func", 2.0),
        part("later", f"{own}:async_reward"),
    ]
    rows = train(reward={"parts": parts})
    assert [row["score"] for row in rows] == pytest.approx([1.1, 1.2, 1.4, 1.5])
    assert rows[0]["score_parts"] == pytest.approx({"own": 0.9, "read": 0.1, "later": 0.0})


@pytest.mark.long
def test_the_class_may_be_the_data(train):
    data = {"train": [{"path": "environment", "arguments": {"size": 8, "target": 2}}]}
    rows = train(data=data)
    assert {row["prompt"] for row in rows} == {"2+1=?"}
    assert {row["score"] for row in rows} == {0.8}


def test_a_row_whose_reset_raises_is_left_out_and_shows_why(train, tmp_path):
    rows = train((1, 3, 4, 5))
    assert [row["score"] for row in rows][::2] == pytest.approx([0.9, 0.6])
    [call] = rows[1]["calls"]
    assert call["error"].startswith("RuntimeError: no three (my_env.py")
    assert call["name"] == "reset"
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert {event["row"] for event in events if event["kind"] == "unscorable"} == {1}


@pytest.mark.long
def test_too_many_rows_without_a_reward_stop_the_run(train):
    with pytest.raises(RunStopped, match="could not be scored, more than"):
        train((3, 3, 4, 5), share=0.4)


def test_a_class_without_get_reward_needs_another_reward(train, tmp_path):
    with pytest.raises(UserError, match="takes `get_reward` of the environment's class"):
        train(name="Silent")
    rows = train(name="Silent", reward={"kind": f"{tmp_path}/my_env.py:reward_func"})
    assert [row["score"] for row in rows] == pytest.approx([0.1, 0.2, 0.4, 0.5])


def test_a_reward_that_reads_environments_needs_a_class_of_trls(train, tmp_path):
    with pytest.raises(UserError, match="asks for 'environments', which TRL passes"):
        train(
            reward={"kind": f"{tmp_path}/my_env.py:reward_func"},
            rollout={"prompts": 4, "samples_per_prompt": 1},
        )
