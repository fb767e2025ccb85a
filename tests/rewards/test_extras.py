"""What else verl's score dict holds is kept beside the score."""

import json

import pytest

import tether

SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) / 10, "acc": solution_str == ground_truth,
            "pred": solution_str[:2], "nan": float("nan"), "why": {"long": [1, 2]}}
"""


@pytest.mark.parametrize("in_python", [False, True])
def test_other_entries_of_the_score_dict_stand_in_the_runs_rows(tiny_config, tmp_path, in_python):
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "1+1=?", "data_source": "sums", "ground_truth": "2"}
    rows.write_text((json.dumps(row) + "\n") * 6)
    (tmp_path / "score.py").write_text(SCORE)
    config = {
        **tiny_config,
        "data": {"train": str(rows), "heldout": str(rows)},
        "reward": {"kind": f"{tmp_path / 'score.py'}:compute_score"},
        "train": {"iterations": 1},
    }
    names: dict = {}
    exec(SCORE, names)
    tether.train(config, reward=names["compute_score"] if in_python else None)
    run = tmp_path / "run"
    [first, *_] = [json.loads(line) for line in (run / "rollouts" / "000000.jsonl").open()]
    assert first["score_extras"] == {
        "acc": False, "pred": first["response"][:2], "nan": None, "why": "{'long': [1, 2]}"
    }  # fmt: skip
    [asked, *_] = [json.loads(line) for line in (run / "evals" / "000000.jsonl").open()]
    assert asked["greedy"]["score_extras"]["pred"] == asked["greedy"]["response"][:2]


def test_a_run_without_extras_has_no_entry_for_them(tiny_config, tmp_path):
    tether.train({**tiny_config, "train": {"iterations": 1}})
    [first, *_] = (tmp_path / "run" / "rollouts" / "000000.jsonl").read_text().splitlines()
    assert "score_extras" not in json.loads(first)
