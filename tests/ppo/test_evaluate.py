import json
import math

import pytest
import torch
from helpers import changed, table

import tether
from tether.cli.display import results_table
from tether.config.load import load_config
from tether.errors import UserError
from tether.ppo.estimates import Estimate, estimate, estimates_at_k, wilson
from tether.ppo.evaluate import evaluate, read_evaluations
from tether.rewards.rules import ANSWERS_OF
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


def test_several_samples_have_the_interval_of_prompts():
    """Prompts with 4 of 4, 0 of 4, 2 of 4 and 2 of 4 right: mean 1/2, variance 1/8 over prompts,
    so four prompts are worth (1/4) / (1/8) x 4 = 8 independent draws, not 16."""
    found = estimate(scores(1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1), samples=4)
    assert (found.mean, found.count, found.binary) == (0.5, 4, True)
    assert (found.low, found.high) == pytest.approx(wilson(0.5, 8))


def test_prompts_that_do_not_differ_are_worth_at_most_their_draws():
    found = estimate(scores(1, 0, 0, 1), samples=2)
    assert (found.low, found.high) == pytest.approx(wilson(0.5, 4))
    solved = estimate(scores(1, 1, 1, 1), samples=2)  # how much prompts differ is not known
    assert (solved.low, solved.high) == pytest.approx(wilson(1.0, 2))


def test_pass_and_majority_over_prompts_by_hand():
    """Of four samples: 1 right and 3 different wrong answers; 3 right, 1 wrong."""
    found = estimates_at_k(
        scores(1, 0, 0, 0, 1, 1, 1, 0), 4, ["r", "x", "y", "z", "r", "r", "r", "x"]
    )
    assert list(found) == ["pass@1", "pass@2", "pass@4", "maj@1", "maj@2", "maj@4"]
    means = {name: value.mean for name, value in found.items()}
    assert means["pass@1"] == pytest.approx((1 / 4 + 3 / 4) / 2)
    assert means["pass@2"] == pytest.approx((1 / 2 + 1) / 2)
    assert means["pass@4"] == 1.0
    assert means["maj@1"] == pytest.approx(means["pass@1"])
    assert means["maj@4"] == pytest.approx((1 / 4 + 1) / 2)  # four answers tie; three agree
    assert all(value.binary and value.count == 2 for value in found.values())


def test_scores_that_are_not_shares_have_the_best_of_k():
    found = estimates_at_k(scores(0.2, 0.6, 0.4, 0.4), 2, None)
    assert {name: value.mean for name, value in found.items()} == pytest.approx(
        {"best@1": 0.4, "best@2": 0.5}
    )


def test_a_prompt_with_too_few_scored_responses_leaves_that_k():
    found = estimates_at_k(scores(1, None, 0, 1), 2, None)
    assert (found["pass@1"].count, found["pass@2"].count) == (2, 1)


def test_several_sets_are_scored_apart_and_together(tiny_config, tmp_path):
    """Sets keep their names in evals.jsonl and in the responses; all prompts are the mean."""
    rows = {"easy": 3, "hard": 2}
    for name, count in rows.items():
        lines = [json.dumps({"prompt": f"{name} {i}", "answer": "7"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sets = {"easy": str(tmp_path / "easy.jsonl"), "hard": [{"path": str(tmp_path / "hard.jsonl")}]}
    config = changed(tiny_config, data__heldout=sets, train__eval_samples=3, train__iterations=1)
    result = tether.train(
        config, reward=lambda response: {"score": len(set(response)), "answer": 1}
    )
    line = json.loads((result.run / "evals.jsonl").read_text().splitlines()[-1])
    assert list(line["sets"]) == ["easy", "hard"]
    assert [line["sets"][name]["greedy"]["count"] for name in rows] == [3, 2]
    assert list(line["at_k"]) == ["best@1", "best@2", "best@3", "maj@1", "maj@2", "maj@3"]
    for kind in ("sampled", "greedy"):
        means = [line["sets"][name][kind]["mean"] for name in rows]
        assert line[kind]["mean"] == pytest.approx((3 * means[0] + 2 * means[1]) / 5)
    kls = [line["sets"][name]["kl"] for name in rows]
    assert line["kl"] == pytest.approx((3 * kls[0] + 2 * kls[1]) / 5)
    kept = [json.loads(x) for x in (result.run / "evals" / "000001.jsonl").open()]
    assert [row["set"] for row in kept] == ["easy"] * 3 + ["hard"] * 2
    assert all(len(row["samples"]) == 3 and row["samples"][0] == row["sampled"] for row in kept)
    assert read_evaluations(result.run)[-1].record() == {
        k: v for k, v in line.items() if k != "schema"
    }
    shown = results_table(result.before, result.after)
    assert "hard: best@3" in shown
    assert "easy: KL" in shown


@table(
    ("sets", "complaint"),
    [
        ({}, "no set is named"),
        ({"a b": "x.jsonl"}, "'a b' is not a name for a set"),
        ({"easy": 3}, "set easy: write a path, or a list"),
        ({"easy": {"path": "x.jsonl"}}, "set easy: write a path, or a list"),
    ],
)
def test_a_wrong_set_is_named(sets, complaint):
    with pytest.raises(UserError, match=complaint):
        load_config("arithmetic", {"data.heldout": sets})


@table(
    ("rule", "turns", "answer"),
    [
        ("exact_answer", ["5"], "5"),
        ("exact_match", [" Paris. "], "paris"),
        ("number_match", ["So it is 5.00"], "5"),
        ("number_match", ["I do not know"], None),
        ("search_answer", ["look", "<answer>The Nile</answer>"], "nile"),
        ("search_answer", ["nothing"], None),
        ("reasoning_gym", ["<answer> 7 </answer>"], "7"),
    ],
)
def test_the_answer_that_a_rule_compares(rule, turns, answer):
    assert ANSWERS_OF[rule](turns) == answer
