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
