"""`tether resume` and `tether train --resume` as typed, with what they say and their exit codes."""

import json

import pytest
import yaml

from tether.run.lock import RunLock


@pytest.fixture
def recipe(tiny_config, tmp_path):
    path = tmp_path / "recipe.yaml"
    tiny_config["run"] = {"rollouts_every": 0}
    tiny_config["data"].pop("heldout")
    path.write_text(yaml.safe_dump(tiny_config))
    return path


@pytest.fixture
def run(tether, recipe, tmp_path):
    code, *_ = tether("train", recipe, "--run.dir", tmp_path / "run")
    assert code == 0
    return tmp_path / "run"


def test_a_finished_run_says_so_and_exits_with_0(tether, run):
    code, out, err = tether("resume", run)
    assert (code, err) == (0, "")
    assert "is finished: 2 of 2 iterations were done already" in out


def test_more_iterations_go_on_from_where_it_stood(tether, run):
    code, out, _ = tether("resume", run, "--train.iterations", "3")
    assert code == 0
    assert "resuming   after 2 iterations: checkpoint" in out
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [0, 1, 2]
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["iterations"] == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["resume"], "Which run?"),
        (["resume", "nowhere"], "nowhere is not a run: there is no config.yaml in it."),
        (["resume", "run", "more"], "Expected one run"),
        (
            ["resume", "run", "--train.iterations", "3", "--actor.lr", "2e-3"],
            "actor.lr, 0.001 then and 0.002 now",
        ),
        (["resume", "run", "--actor.lrr", "1"], "did you mean actor.lr?"),
        (["train", "recipe.yaml", "--resume"], "say which run: --run.dir RUN"),
        (["train", "recipe.yaml", "--run.dir", "run"], "continue it with --resume"),
    ],
)
def test_what_cannot_be_resumed_is_refused_in_one_sentence(tether, run, words, sentence):
    code, _, err = tether(*words)
    assert code == 2
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


def test_a_run_that_another_process_writes_is_refused(tether, run):
    with RunLock(run):
        code, _, err = tether("resume", run)
    assert code == 2
    assert "is being written by another process" in err


def test_train_with_resume_is_one_line_for_begin_and_go_on(tether, recipe, tmp_path):
    words = ("train", recipe, "--run.dir", tmp_path / "job", "--resume")
    assert tether(*words)[0] == 0
    code, out, _ = tether(*words)
    assert code == 0
    assert "is finished" in out
