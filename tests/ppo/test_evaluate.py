import json
import math

import pytest
import torch
from helpers import table

import tether
from tether.ppo.evaluate import Estimate, estimate, evaluate, wilson
from tether.run.writer import cut_back
from tether.types import Scores


@table(
    ("successes", "count", "low", "high"),
    [
        (5, 10, 0.236593, 0.763407),
        (8, 10, 0.490162, 0.943318),
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (50, 100, 0.403832, 0.596168),
        (1, 1, 0.206549, 1.0),
    ],
)
def test_wilsons_interval_by_hand(successes, count, low, high):
    assert wilson(successes / count, count) == pytest.approx((low, high), abs=1e-5)


@table("count", range(1, 60))
def test_wilsons_interval_stays_inside_zero_and_one(count):
    assert wilson(0.0, count)[0] >= 0.0
    assert wilson(1.0, count)[1] <= 1.0


def scores(*values: float | None) -> Scores:
    numbers = torch.tensor([v or 0.0 for v in values])
    scored = torch.tensor([v is not None for v in values])
    return Scores(numbers, scored, scored)


def test_unscored_rows_leave_the_estimate():
    found = estimate(scores(1.0, None, 0.0, 1.0, 1.0, None))
    assert (found.mean, found.count, found.binary) == (0.75, 4, True)
    assert (found.low, found.high) == pytest.approx(wilson(0.75, 4))


def test_other_scores_get_the_normal_interval():
    """0.5, 1, 1.5, 2 have standard deviation sqrt(5/12); 1.96 of it over sqrt(4)."""
    found = estimate(scores(0.5, 1.0, 1.5, 2.0))
    half = 1.959964 * math.sqrt(5 / 12) / 2
    assert not found.binary
    assert (found.mean, found.low, found.high) == pytest.approx((1.25, 1.25 - half, 1.25 + half))


def test_intervals_that_do_not_touch_are_apart():
    low, middle, high = (Estimate(m, m - 0.1, m + 0.1, 9, True) for m in (0.2, 0.35, 0.6))
    assert high.apart_from(low)
    assert low.apart_from(high)
    assert not low.apart_from(middle)


def test_an_evaluation_scores_each_prompt_greedily_and_sampled_and_measures_the_kl(build):
    """By hand: scores of the greedy rows' texts; KL 0 to an equal reference, more to another."""
    roles, config = build()
    prompts = roles.heldout_prompts.first(5)
    first, events = evaluate(0, prompts, roles, config)
    assert events == []
    assert first.greedy.count == first.sampled.count == 5
    assert first.kl == pytest.approx(0, abs=1e-5)
    assert evaluate(3, prompts, roles, config)[0].sampled == first.sampled  # the same draws
    with torch.no_grad():
        for weight in roles.reference.policy.model.parameters():
            weight.mul_(0.8)
    assert evaluate(0, prompts, roles, config)[0].kl > 0.1


def test_what_was_said_to_held_out_prompts_is_kept_and_repeats(tiny_config, tmp_path):
    """One object per prompt and evaluation; the means of evals.jsonl are those of the rows."""
    config = {**tiny_config, "train": {"iterations": 2, "eval_every": 1, "eval_prompts": 5}}
    runs = [tmp_path / name for name in ("a", "b")]
    for run in runs:
        tether.train({**config, "run": {**config["run"], "dir": str(run)}})
    names = sorted(path.name for path in (runs[0] / "evals").iterdir())
    assert names == ["000000.jsonl", "000001.jsonl", "000002.jsonl"]
    for name in names:
        assert (runs[0] / "evals" / name).read_bytes() == (runs[1] / "evals" / name).read_bytes()
    lines = [json.loads(line) for line in (runs[0] / "evals" / names[2]).open()]
    assert [(line["iteration"], line["row"], line["data_line"]) for line in lines] == [
        (2, row, row + 1) for row in range(5)
    ]
    assert all(isinstance(line["greedy"]["response"], str) for line in lines)
    last = json.loads((runs[0] / "evals.jsonl").read_text().splitlines()[-1])
    for kind in ("greedy", "sampled"):
        mean = sum(line[kind]["score"] for line in lines) / 5
        assert mean == pytest.approx(last[kind]["mean"])
    assert "responses" not in last


def test_the_rows_of_the_first_and_the_last_iteration_are_always_kept(tiny_config, tmp_path):
    run = {**tiny_config["run"], "rollouts_every": 3}
    tether.train({**tiny_config, "run": run, "train": {"iterations": 6}})
    kept = sorted(path.name for path in (tmp_path / "run" / "rollouts").iterdir())
    assert kept == ["000000.jsonl", "000003.jsonl", "000005.jsonl"]


def test_later_responses_are_cut_back_with_the_evaluations(tmp_path):
    (tmp_path / "evals").mkdir()
    for name in ("000000.jsonl", "000002.jsonl", "000003.jsonl", "000003.tmp"):
        (tmp_path / "evals" / name).write_text("")
    cut_back(tmp_path, 2)
    kept = sorted(path.name for path in (tmp_path / "evals").iterdir())
    assert kept == ["000000.jsonl", "000002.jsonl"]
