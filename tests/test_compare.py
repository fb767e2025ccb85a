"""`make compare`: its search, what it reads off runs, and its frontier, by hand."""

import importlib.util
import math
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from helpers import table

from tether.config.load import load_config

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location("compare", SCRIPTS / "compare.py")
        module = sys.modules["compare"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPTS))
        del sys.modules["compare"]


def options(tmp_path, **changes):
    given = {"recipe": "arithmetic", "iterations": 12, "untuned": False, "seeds": 3}
    return Namespace(**given, results=tmp_path / "kept", folder=tmp_path / "work", **changes)


def test_every_setting_of_every_variant_is_a_valid_config_with_as_many_rows(script, tmp_path):
    comparison = script.Comparison(options(tmp_path))
    assert len(comparison.variants) > 20
    for variant in comparison.variants.values():
        assert len(variant.knob) == 3
        for setting in variant.knob:
            fields = {**variant.fields, **setting}
            config = load_config(comparison.recipe, {**fields, **script.bank(fields, script_base)})
            assert config.rows == script_base.rows


script_base = load_config("arithmetic", {})


def result(scores, kls=None, seconds=1.0):
    """What a run keeps, with evaluations after 0, 3, 6, … iterations."""
    kls = kls or [0.0] * len(scores)
    evals = [
        {"iteration": 3 * i, "sampled": {"mean": s}, "greedy": {"mean": s}, "kl": kl}
        for i, (s, kl) in enumerate(zip(scores, kls, strict=True))
    ]
    return {"evals": evals, "iteration_seconds": [seconds] * (3 * (len(scores) - 1))}


def test_the_search_takes_the_best_rate_and_then_the_best_knob(script, tmp_path, monkeypatch):
    """Half the rate is best, and at that rate the third of the knob's values."""
    asked = []

    def run(store, name, recipe, fields, *_, **__):
        asked.append((name, fields["actor.lr"], fields["actor.stop_kl"], fields["seed"]))
        score = {2e-4: 0.8, 4e-4: 0.7, 8e-4: 0.6}[fields["actor.lr"]] + fields["actor.stop_kl"]
        return result([0.5, score])

    monkeypatch.setattr(script, "one_run", run)
    found = script.Comparison(options(tmp_path)).tuned("clip, stop at a KL")
    assert (found["actor.lr"], found["actor.stop_kl"]) == (2e-4, 0.04)
    tried = [(lr, kl) for _, lr, kl, _ in asked]
    assert tried[:3] == [(4e-4, 0.02), (2e-4, 0.02), (8e-4, 0.02)]
    assert set(tried[3:]) == {(2e-4, 0.02), (2e-4, 0.01), (2e-4, 0.04)}
    assert {(name, seed) for name, *_, seed in asked} == {
        ("compare-clip--stop-at-a-KL-seed100", 100)
    }


def test_trpo_searches_over_the_bound_of_its_step(script, tmp_path, monkeypatch):
    asked = []

    def run(store, name, recipe, fields, *_, **__):
        asked.append(fields)
        return result([0.5, 1 - fields["actor.update.max_kl"]])

    monkeypatch.setattr(script, "one_run", run)
    found = script.Comparison(options(tmp_path)).tuned("trpo")
    assert found["actor.update.max_kl"] == 0.01
    assert not any("actor.lr" in fields for fields in asked)


def test_value_pretraining_has_one_iteration_less_for_the_rows_that_it_samples(
    script, tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setattr(script, "one_run", lambda *a, **_: asked.append(a[3]) or result([0.5, 0.6]))
    comparison = script.Comparison(options(tmp_path))
    fields = {"critic.pretrain.max_epochs": 5}
    comparison.trial("two lambdas, value pretraining", 0, fields)
    comparison.trial("clip", 0, {})
    comparison.trial(script.LONGER, 0, {})
    assert [given["train.iterations"] for given in asked] == [11, 12, 24]
    assert asked[0]["critic.pretrain.prompts"] == script_base.rollout.prompts


@table(
    ("value", "what", "expected"),
    [
        (0.5, "kl", 0.6),  # half way between KL 0 and 1: scores 0.5 and 0.7
        (1.5, "kl", 0.75),  # a quarter of the way from 1 to 3
        (3.0, "seconds", 0.7),
        (4.0, "kl", None),
    ],
)
def test_a_score_at_equal_kl_or_seconds_lies_on_the_line_between_evaluations(
    script, value, what, expected
):
    points = script.trial_of(result([0.5, 0.7, 0.9], [0.0, 1.0, 3.0])).points
    assert script.score_at(value, what, points) == pytest.approx(expected)


def test_best_of_n_and_the_closed_form_of_two_prompts(script):
    """Pass rates 1/4 and 1/2 of four samples. Best of 2: 1 - 3/6 and 1 - 1/6; best of 4: 1, 1."""
    scores = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]
    found = script.best_of_n_curve(scores)
    expected = [
        (0.0, 3 / 8),
        (math.log(2) - 1 / 2, (1 / 2 + 5 / 6) / 2),
        (math.log(4) - 3 / 4, 1.0),
    ]
    assert [x for point in found for x in point] == pytest.approx([x for p in expected for x in p])
    curve = script.closed_form_curve(scores)
    kls = [kl for kl, _ in curve]
    assert kls == sorted(kls)
    assert curve[0] == pytest.approx((0.0, 3 / 8), abs=1e-3)
    # At eta = ln 3 the policies are 1/2 and 3/4 right. The correction for the bias of four samples,
    # 1/18 and 1/24 of a nat there, can only lower what it costs, by at most their mean.
    by_hand = (0.5 * math.log(2) + 0.5 * math.log(2 / 3) + 0.75 * math.log(1.5)
               + 0.25 * math.log(0.5)) / 2  # fmt: skip
    near = min(curve, key=lambda point: abs(point[1] - 5 / 8))
    assert by_hand - 7 / 144 - 0.003 <= near[0] <= by_hand + 0.003


def test_trpo_is_read_off_at_clips_kl_and_seconds(script):
    results = {
        "clip": [script.trial_of(result([0.5, 0.8], [0.0, 1.0], seconds=1.0))],
        script.LONGER: [script.trial_of(result([0.5, 0.7, 0.9], [0.0, 0.5, 1.5], seconds=2.0))],
    }
    by_kl, by_seconds = script.equal_lines(results)
    assert "as much KL as clip, by seeds: 80.0%; clip 80.0%" in by_kl  # half way from 0.5 to 1.5
    assert "as many seconds as clip, by seeds: 60.0%" in by_seconds  # 3 of 6
    assert script.equal_lines({"clip": results["clip"]}) == []
