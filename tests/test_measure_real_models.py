"""The numbers of docs/real-models.md, by hand."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location("real", SCRIPTS / "measure_real_models.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(SCRIPTS))


def test_distinct_n_counts_runs_of_words_over_all_texts(script):
    texts = ["a b A b", "b c"]
    assert script.distinct(texts, 1) == 3 / 6  # a b a b b c
    assert script.distinct(texts, 2) == 3 / 4  # ab ba ab, bc
    assert script.distinct([""], 2) == 0


def test_explained_variance_is_that_of_undiscounted_returns_in_the_second_half(script, tmp_path):
    (tmp_path / "rollouts").mkdir()
    rows = {
        0: [{"values": [9.0, 9.0], "token_level_rewards": [0.0, 1.0]}],  # the first half
        1: [
            {"values": [0.5, 2.0], "token_level_rewards": [-1.0, 2.0]},  # returns 1, 2
            {"values": [3.0], "token_level_rewards": [3.0]},  # returns 3
        ],
    }
    for iteration, found in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in found)
        (tmp_path / "rollouts" / f"{iteration:06d}.jsonl").write_text(text)
    # Residuals 0.5, 0, 0 have variance 1/18; returns 1, 2, 3 have 2/3: 1 - 1/12.
    assert script.second_half_explained(tmp_path, 2) == pytest.approx(1 - 1 / 12)


def test_responses_that_keep_all_constraints_are_counted_by_part(script):
    rows = [
        {"columns": {"part": part}, "sampled": {"score_parts": {"kept": share}}}
        for part, share in [("topics", 1.0), ("topics", 0.5), ("kinds", 1.0), ("kinds", 1.0)]
    ]
    found = script.by_part(rows)
    assert {part: mean for part, (mean, *_) in found.items()} == {"topics": 0.5, "kinds": 1.0}


def test_every_run_is_a_config_that_is_valid(script):
    for recipe, fields in script.RUNS.values():
        script.load_config(recipe, fields)


def test_a_curve_is_smoothed_over_what_came_before(script):
    assert script.smoothed([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]


def test_what_is_kept_is_pasted_and_what_is_not_is_named(script, tmp_path, monkeypatch):
    probe = {"right": [True, False], "nats": [3.0, 4.0], "answers": ["Yes."]}
    better = {"right": [True, True], "nats": [3.0, 4.0], "answers": ["No."]}
    result = {
        "score": {"before": [0.1, 0.0, 0.2], "after": [0.8, 0.7, 0.9]},
        "kept": {"before": {}, "after": {}},
        "kl": {"before": 0.0, "after": 3.5},
        "distinct": {"before": [0.4, 0.8], "after": [0.4, 0.76]},
        "greedy_different": {"before": 1.0, "after": 0.9},
        "perplexity": {"before": 10.0, "after": 9.0},
        "explained": 0.5,
        "probe": {"before": probe, "after": better},
        "samples": [{"prompt": "The tent", "before": "leaked.", "after": "is great."}],
        "curve": [[0.1, 0.0], [0.8, 3.5]],
        "iterations": 2,
        "minutes": 11.5,
        "peak": 2**30,
        "machine": "2026-11-20, a machine.",
    }
    for language in ("", "zh"):
        page = tmp_path / language / "real-models.md"
        page.parent.mkdir(exist_ok=True)
        lines = [f"<!-- {kind}: {script.MADE} -->\n<!-- end -->" for kind in (
            "sentiment", "samples of sentiment", "instructions", "samples of instructions"
        )]  # fmt: skip
        page.write_text("\n".join(lines))
    (tmp_path / "figures").mkdir()
    monkeypatch.setattr(script, "DOCS", tmp_path)
    monkeypatch.setattr(script, "PAGE", tmp_path / "real-models.md")
    script.write_page({"sentiment-0": result})
    for page in (tmp_path / "real-models.md", tmp_path / "zh" / "real-models.md"):
        text = page.read_text()
        assert "0.800" in text
        assert "50.0% → 100.0%" in text
        assert "x 0.90" in text
        assert "is great." in text
        assert "Not run: sentiment-1, sentiment-2" in text
        assert "Not run: instructions-0" in text
    assert "<svg" in (tmp_path / "figures" / "sentiment.svg").read_text()


def test_a_run_that_is_kept_is_not_trained_again(script, tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(script, "train", lambda config: trained.append(config.seed))
    monkeypatch.setattr(script, "read_run", lambda run: {"minutes": 1.0})
    for _ in range(2):
        found = script.measured(script.Store(tmp_path), "sentiment-1", threads=1)
        assert (found["minutes"], found["settings"]["fields"]) == (1.0, {"seed": 1})
    assert trained == [1]
