"""`tether sft`, `tether reward-model` and a recipe of three stages, as a person meets them."""

import json
import os
import signal
from pathlib import Path

import pytest
from helpers import table

from tether.ppo.optimizer import Optimizer

RUNS = ("whole", "sft")


def write_rows(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def fields(tiny_model_dir, tmp_path) -> dict[str, list[str]]:
    """What each command needs to be told."""
    talk = [{"prompt": f"{i}+1", "response": f"{i + 1}"} for i in range(6)]
    pairs = [{"prompt": f"{i}", "chosen": f"{i}x", "rejected": f"{i}y"} for i in range(6)]
    files = {
        "sft": write_rows(tmp_path / "talk.jsonl", talk),
        "reward-model": write_rows(tmp_path / "pairs.jsonl", pairs),
    }
    return {
        name: [
            *("--model.start", tiny_model_dir, "--threads", "1", "--train.minibatch_rows", "3"),
            *("--data.train", path, "--data.heldout", path, "--run.dir", f"runs/{name}"),
        ]
        for name, path in files.items()
    }


def test_both_stages_say_what_they_did_and_where_the_model_is(tether, fields):
    code, out, _ = tether("sft", *fields["sft"])
    assert code == 0
    assert "2 steps" in out
    assert "held-out   after 2 steps: loss" in out
    assert "model      runs/sft/checkpoints/000002/actor" in out
    code, out, _ = tether("reward-model", *fields["reward-model"])
    assert code == 0
    assert "accuracy" in out
    assert "how often right" in out
    assert "runs/reward-model/checkpoints/000002/reward" in out
    code, out, _ = tether("runs")
    assert code == 0
    assert "loss " in out
    assert "% right" in out
    code, out, _ = tether("generate", "1+1", "--model", "runs/sft", "--max-tokens", "3")
    assert code == 0


def test_a_run_of_a_stage_stands_for_its_newest_model(tether, fields, tiny_data):
    tether("sft", *fields["sft"])
    tether("reward-model", *fields["reward-model"], "--model.start", "runs/sft")
    words = ("--model.actor", "runs/sft", "--data.train", tiny_data, "--data.heldout", "null")
    learned = ("--model.critic", "runs/reward-model", "--reward.kind", "model:runs/reward-model")
    code, _, err = tether("check", *words, *learned)
    assert (code, err) == (0, "")


def test_a_recipe_is_a_yaml_file_with_fields_over_it(tether, fields, tmp_path):
    tether("sft", *fields["sft"])
    again = ("sft", "runs/sft/config.yaml", "--run.dir", "runs/again", "--train.passes", "2")
    code, out, _ = tether(*again)
    assert code == 0
    assert "runs/again, 4 steps" in out


@table(
    ("words", "sentence"),
    [
        (["sft"], "model.start is missing"),
        (["sft", "--model.begin", "x"], "Unknown field model.begin"),
        (["sft", "rlhf"], "is a recipe of `tether train`"),
        (["reward-model", "--train.lr", "0"], "train.lr is 0"),
        (["check", "rlhf"], "rlhf is a recipe of `tether train`, not of this command"),
        (["train", "rlhf", "--resume"], "To resume, say which run: --run.dir RUN"),
        (["sft", "--resume", "--model.start", "x", "--data.train", "y"], "To resume, say which"),
        (["train", "rlhf", "--task.pairs", "0"], "task.pairs is 0"),
        (["train", "rlhf", "--ppo.actor.rate", "1"], "Unknown field actor.rate"),
    ],
)
def test_wrong_input_gets_one_sentence_and_code_2(tether, words, sentence):
    code, _, err = tether(*words)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["sft", "reward-model"])
def test_help_lists_every_field_of_the_stage(tether, command):
    code, out, _ = tether(command, "--help")
    assert code == 0
    assert "--train.warmup_share" in out
    assert "--rollout.prompts" not in out


def test_a_stopped_stage_names_the_command_that_goes_on(tether, fields, monkeypatch):
    whole = tether("sft", *fields["sft"], "--run.dir", "runs/whole", "--train.passes", "4")
    step = Optimizer.step

    def interrupted(optimizer):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(optimizer)

    with monkeypatch.context() as patched:
        patched.setattr(Optimizer, "step", interrupted)
        code, out, _ = tether("sft", *fields["sft"], "--train.passes", "4")
    assert code == 143
    assert "stopped by SIGTERM after 1 steps; all saved." in out
    assert "Go on:     tether resume runs/sft" in out
    code, out, _ = tether("resume", "runs/sft")
    assert (code, whole[0]) == (0, 0)
    assert "resuming   after 1 steps" in out
    weights = [Path(f"runs/{run}/checkpoints/000008/actor/model.safetensors") for run in RUNS]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    code, out, _ = tether("sft", *fields["sft"], "--train.passes", "4", "--resume")
    assert code == 0
    assert "runs/sft is finished: 8 steps were done already." in out
