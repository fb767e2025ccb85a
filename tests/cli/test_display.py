"""What a run prints: its curves while it goes on, and what it reached at its end."""

from pathlib import Path

import pytest
from helpers import table

from tether.cli.display import Display, results_table
from tether.cli.terminal import sparkline
from tether.config.load import load_config
from tether.ppo.estimates import Estimate
from tether.ppo.evaluate import Evaluation
from tether.train.training import Result
from tether.train.watch import IterationRecord


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


@table(
    ("values", "width", "drawn"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([7, 0], 8, "█▁"),
        ([5, 5, 5], 8, "▄▄▄"),  # no ups and downs: in the middle
        ([0, 2, 4, 10], 2, "▁█"),  # means 1 and 7
        ([0, None, 7], 8, "▁ █"),
        ([0, float("nan"), float("inf"), 7], 8, "▁  █"),
        ([None, None], 8, "  "),
        ([], 8, ""),
        ([1, None, 3, 3], 2, "▁█"),  # what is missing is not counted
    ],
)
def test_a_curve_of_characters(values, width, drawn):
    assert sparkline(values, width) == drawn


def record(iteration: int, score: float) -> IterationRecord:
    metrics = {"score/mean": score, "actor/entropy": 0.5, "response/length_mean": 4.0 - score}
    return IterationRecord(iteration, metrics, {"throughput/tokens_per_second": 9.0})


def test_the_curves_of_score_entropy_and_length_stand_under_the_bar_and_at_the_end(capsys):
    display = Display(load_config("arithmetic"))
    for iteration in range(8):
        display.iterated(record(iteration, iteration / 7))
    assert display.drawn_curves() == "score ▁▂▃▄▅▆▇█  entropy ▄▄▄▄▄▄▄▄  length █▇▆▅▄▃▂▁"
    under = [str(shown) for shown in display.progress.get_renderables()][1]
    assert under == f"  {display.drawn_curves()}"
    result = Result(Path("runs/a"), 8, None, None, train_seconds=1.0, interrupted=None)
    display.summary(result)
    assert "curves     score ▁▂▃▄▅▆▇█" in capsys.readouterr().out


def test_four_curves_fit_a_terminal_of_80():
    display = Display(load_config("arithmetic"))
    display.curves = {label: [0.0, 1.0] * 500 for label in display.curves}
    assert len(display.drawn_curves()) <= 78
