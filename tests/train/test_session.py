"""What a person is told when a run cannot go on as it is."""

import json
from pathlib import Path

import pytest
from helpers import configured, distinct_letters

import tether
from tether.cli.display import Display
from tether.errors import OthersLost, UserError
from tether.ppo.evaluate import read_evaluations
from tether.train.loop import Loop
from tether.train.ppo import PPOJob
from tether.train.session import process_group


def test_a_tensor_parallel_run_alone_is_told_what_to_write(tiny_config):
    config = configured(tiny_config, launch={"tensor_parallel": 2, "weights": "sharded"})
    remedy = r"torchrun --nproc-per-node 2 .* or write --launch\.tensor_parallel 1\."
    with pytest.raises(UserError, match=remedy), process_group(PPOJob(config)):
        pass


def test_the_sentence_about_a_lost_process_names_the_command_that_goes_on(tiny_config, monkeypatch):
    def lose(loop):
        raise OthersLost("Process 0 of 2 cannot go on: no answer from process 1.")

    monkeypatch.setattr(Loop, "run", lose)
    with pytest.raises(OthersLost, match=rf"`tether resume {tiny_config['run']['dir']}`"):
        tether.train(tiny_config, reward=distinct_letters)


def test_an_evaluation_that_is_none_is_named_by_its_line(tmp_path):
    (tmp_path / "evals.jsonl").write_text(json.dumps({"iteration": 0, "greedy": 3}) + "\n")
    with pytest.raises(UserError, match=r"evals\.jsonl, line 1 is damaged"):
        read_evaluations(tmp_path)


def test_the_name_of_a_run_cannot_steer_the_terminal(tiny_config, capsys):
    Display(configured(tiny_config)).started(Path("runs/\x1b]0;mine\x07"), 2)
    assert "\x1b" not in capsys.readouterr().out
