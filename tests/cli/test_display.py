"""The table at the end of a run."""

from tether.cli.display import results_table
from tether.train.evaluate import Estimate, Evaluation


def evaluation(mean: float, calls: float | None) -> Evaluation:
    share = Estimate(mean=mean, low=mean - 0.1, high=mean + 0.1, count=100, binary=True)
    return Evaluation(0, share, share, kl=0.5, calls=calls)


def test_the_results_tell_how_often_tools_were_called():
    found = results_table(evaluation(0.2, 0.35), evaluation(0.9, 1.5)).splitlines()
    assert found[2].split() == ["sampled", "20.0%", "10.0%", "–", "30.0%", "90.0%", "80.0%", "–",
                                "100.0%", "+70.0", "points"]  # fmt: skip
    assert found[-1].split() == ["tool", "calls", "0.35", "1.50", "a", "response"]


def test_without_tools_there_is_no_line_for_them():
    assert "calls" not in results_table(evaluation(0.2, None), evaluation(0.9, None))
