"""Rows that share prompts, on two processes against one."""

from pathlib import Path

import pytest
from helpers import changed, distinct_letters, read_jsonl

import tether
from dist.processes import run_processes


@pytest.fixture
def config(tiny_config, tmp_path) -> dict:
    """Prompts of 50 tokens, 4 samples: packing one alone pays; 3 prompts for 2 processes."""
    path = tmp_path / "long.jsonl"
    path.write_text("".join(f'{{"prompt": "{str(n) * 50}"}}\n' for n in range(6)))
    return changed(
        tiny_config,
        model__dtype="float64",
        data={"train": str(path), "heldout": str(path)},
        rollout={"prompts": 3, "samples_per_prompt": 4, "max_response_tokens": 8},
        actor={"minibatch_rows": 12, "epochs": 1, "lr": 1e-3},
        critic={},
        train={"iterations": 2, "checkpoint_every": 0},
    )


def train(config: dict, run: str) -> list[dict]:
    tether.train(changed(config, run__dir=run), reward=distinct_letters)
    return read_jsonl(Path(run) / "metrics.jsonl")


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_two_processes_train_on_shared_prompts_as_one_does(config, tmp_path, weights):
    alone = train(config, str(tmp_path / "alone"))
    both = changed(config, launch={"weights": weights})
    found, _ = run_processes(2, train, both, str(tmp_path / "both"))
    for ours, theirs in zip(alone, found, strict=True):
        for name in ("actor/shared_tokens", "critic/shared_tokens"):
            share = ours.pop(name)
            assert share > 0.5
            assert theirs.pop(name) == pytest.approx(share)
        assert theirs == pytest.approx(ours, rel=1e-6, abs=1e-9)
