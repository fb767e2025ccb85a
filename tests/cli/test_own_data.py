"""A shipped recipe with data of one's own: the shipped held-out prompts do not stay."""

import json

import pytest
import yaml
from helpers import table

from tether.config.load import load_config

SMALL = [
    *("--threads", "1", "--rollout.prompts", "4", "--rollout.samples_per_prompt", "2"),
    *("--actor.minibatch_rows", "8", "--train.iterations", "1", "--train.eval_prompts", "8"),
    *("--run.dir", "run"),
]
TRL_REWARD = """
def accuracy(prompts, completions, answer, **kwargs):
    return [float(c[0]["content"].strip() == a) for c, a in zip(completions, answer)]
"""


@pytest.fixture
def own(tmp_path):
    """Rows and a reward as TRL's users have them."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}+3=?"}], "answer": str(a + 3)}
        for a in range(10, 22)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(TRL_REWARD)


@pytest.mark.usefixtures("own")
def test_own_data_in_a_shipped_recipe_are_not_evaluated_on_the_shipped_sums(tether, tmp_path):
    words = ["--data.train", "train.jsonl", "--reward.kind", "rewards.py:accuracy"]
    code, out, err = tether("train", "arithmetic", "--model.actor", "tether:starter", *words,
                            *SMALL)  # fmt: skip
    assert code == 0, err
    assert "nothing is evaluated" in out
    assert (tmp_path / "run" / "evals.jsonl").read_text() == ""
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]["heldout"] is None


@pytest.mark.usefixtures("own")
def test_the_evaluating_line_names_the_file(tether):
    words = ["--data.train", "train.jsonl", "--data.heldout", "train.jsonl"]
    code, out, err = tether("train", *words, "--reward.kind", "rewards.py:accuracy", *SMALL)
    assert code == 0, err
    assert "evaluating 8 held-out prompts of train.jsonl" in out


@table(
    ("overrides", "heldout"),
    [
        ({}, "tether:arithmetic/heldout.jsonl"),
        ({"data.train": "mine.jsonl"}, None),
        ({"data.train": [{"path": "mine.jsonl"}]}, None),
        ({"data.train": "mine.jsonl", "data.heldout": "my-test.jsonl"}, "my-test.jsonl"),
        (
            {"data.train": "mine.jsonl", "data.heldout": "tether:arithmetic/heldout.jsonl"},
            "tether:arithmetic/heldout.jsonl",
        ),
        ({"data.train": "tether:facts/train.jsonl"}, "tether:arithmetic/heldout.jsonl"),
    ],
)
def test_shipped_heldout_prompts_stay_with_shipped_data_or_when_asked_for(overrides, heldout):
    assert load_config("arithmetic", overrides).data.heldout == heldout


def test_a_file_of_ones_own_that_pairs_its_data_with_shipped_heldout_keeps_them(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: {actor: tether:starter}\nreward: {kind: exact_answer}\n"
        "data: {train: a.jsonl, heldout: tether:arithmetic/heldout.jsonl}\n"
    )
    config = load_config(path, {"data.train": "b.jsonl"})
    assert config.data.heldout == "tether:arithmetic/heldout.jsonl"
