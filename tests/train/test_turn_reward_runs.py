"""Whole runs: rewards per turn that are 0 for all but the last are a number for the response."""

import json
from pathlib import Path

import pytest
from golden.golden import build_world, config_of

import tether
from tether import api


def total(policy_turns: list[str]) -> float:
    """Coarse, so that some rows tie, and never 0 for all."""
    return len(set("".join(policy_turns))) // 3 / 4


def for_the_response(policy_turns):
    return total(policy_turns)


def for_the_last_turn(policy_turns):
    return tether.TurnRewards([0.0] * (len(policy_turns) - 1) + [total(policy_turns)])


def for_every_turn(policy_turns):
    return tether.TurnRewards([total(policy_turns) / len(policy_turns)] * len(policy_turns))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    build_world(folder)
    return folder


def trained(world: Path, name: str, reward, advantage: dict) -> Path:
    """Three iterations with a tool, whose output parts the turns."""
    config = config_of("tool", world)
    config["run"] = {**config["run"], "dir": str(world / name)}
    config["advantage"] = advantage
    config["rollout"] = {**config["rollout"], "max_response_tokens": 24}
    if not (world / name).exists():
        api.train(config, reward=reward)
    return world / name


def files(run: Path) -> dict[str, bytes]:
    """What the run computed, byte for byte: numbers, evaluations and the state of both roles."""
    found = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "evals.jsonl")}
    checkpoint = max(run.glob("checkpoints/0*"))
    weights = {*checkpoint.rglob("*.safetensors"), *checkpoint.rglob("*.pt")}
    return found | {str(p.relative_to(run)): p.read_bytes() for p in weights}


def rows(run: Path) -> list[dict]:
    paths = sorted(run.glob("rollouts/*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def without_turn_rewards(row: dict) -> dict:
    """A row without the one field that only rewards per turn have."""
    turns = [{k: v for k, v in turn.items() if k != "reward"} for turn in row["turns"]]
    return {**row, "turns": turns}


@pytest.mark.parametrize(
    "advantage",
    [
        pytest.param({}, id="zero"),
        pytest.param({"truncation": "bootstrap"}, id="bootstrap", marks=pytest.mark.long),
        pytest.param({"truncation": "mask"}, id="mask", marks=pytest.mark.long),
        pytest.param({"estimator": "dr_grpo"}, id="dr_grpo", marks=pytest.mark.long),
    ],
)
def test_a_run_with_zero_for_all_turns_but_the_last_is_that_of_a_plain_score(world, advantage):
    """In every byte of metrics, evaluations and weights. In the rollouts one field is more: the
    `reward` of each of the policy's turns, which a number for the response does not say."""
    name = "-".join(advantage.values()) or "default"
    plain = trained(world, f"{name}-plain", for_the_response, advantage)
    turns = trained(world, f"{name}-turns", for_the_last_turn, advantage)
    of_plain, of_turns = files(plain), files(turns)
    assert len(of_plain) >= 4
    assert of_plain == of_turns
    assert [without_turn_rewards(row) for row in rows(turns)] == rows(plain)
    several = [row for row in rows(turns) if sum(turn["policy"] for turn in row["turns"]) > 1]
    assert several  # or there was nothing to show
    for row in several:
        rewards = [turn["reward"] for turn in row["turns"] if turn["policy"]]
        assert rewards[:-1] == [0.0] * (len(rewards) - 1)


def test_the_same_total_spread_over_the_turns_is_another_run(world):
    plain = trained(world, "default-plain", for_the_response, {})
    spread = trained(world, "default-spread", for_every_turn, {})
    assert files(plain).keys() == files(spread).keys()
    assert files(plain) != files(spread)
