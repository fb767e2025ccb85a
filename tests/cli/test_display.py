"""What a run prints at its end."""

from pathlib import Path

import pytest

from tether.cli.display import Display, results_table
from tether.config.load import load_config
from tether.ppo.evaluate import Estimate, Evaluation
from tether.train.training import Result


def evaluation(mean: float, calls: float | None) -> Evaluation:
    share = Estimate(mean=mean, low=mean - 0.1, high=mean + 0.1, count=100, binary=True)
    return Evaluation(0, share, share, kl=0.5, calls=calls)


def test_the_results_tell_how_often_tools_were_called():
    found = results_table(evaluation(0.2, 0.35), evaluation(0.9, 1.5)).splitlines()
    assert found[2].split() == ["sampled", "20.0%", "10.0%", "–", "30.0%", "90.0%", "80.0%", "–",
                                "100.0%", "+70.0", "points"]  # fmt: skip
    assert found[-1].split() == ["tool", "calls", "0.35", "1.50", "per", "response"]


def test_without_tools_there_is_no_line_for_them():
    assert "calls" not in results_table(evaluation(0.2, None), evaluation(0.9, None))


@pytest.mark.parametrize(("tools", "flag"), [([], ""), (["my_tools.py:weather"], " --trust-run")])
def test_the_next_command_is_one_that_works(capsys, tools, flag):
    room = {"rollout.max_response_tokens": 384}
    config = load_config("arithmetic", {"rollout.tools": tools, **room})
    result = Result(Path("runs/a"), 1, None, None, train_seconds=1.0, interrupted=None)
    Display(config).summary(result)
    assert capsys.readouterr().out.endswith(f"Next: tether generate Hello --model runs/a{flag}\n")
