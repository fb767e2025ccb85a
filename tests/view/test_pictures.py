"""Histograms, heat maps, what-if for a batch, held-out responses, one prompt's history."""

import json
import math

import numpy as np
import pytest
from helpers import read_jsonl

from tether.view.pictures import BINS, MAX_HEAT_ROWS, farthest, histogram
from tether.view.run_reader import Folder
from tether.view.samples import read_history
from view.conftest import MadeRun, client_of


def row(number: int, line: int, **more) -> dict:
    tokens = more.pop("tokens", 3)
    lists = {name: [0.0] * tokens for name in ("old_log_probs", "ref_log_probs", "advantages")}
    return {
        "row": number,
        "data_file": "data.jsonl",
        "data_line": line,
        "prompt": f"prompt {line}",
        "columns": {"answer": str(line)},
        "response": f"response {number}",
        "score": 1.0,
        "response_ids": list(range(tokens)),
        "response_mask": [True] * tokens,
        **lists,
        **more,
    }


def write_rows(made: MadeRun, iteration: int, rows: list[dict], folder: str = "rollouts") -> None:
    (made.directory / folder).mkdir(exist_ok=True)
    lines = [json.dumps({"schema": 1, "iteration": iteration, **r}) + "\n" for r in rows]
    (made.directory / folder / f"{iteration:06d}.jsonl").write_text("".join(lines))


def test_a_histogram_counts_every_number_once():
    made = histogram([0.0, 0.0, 1.0, 4.0, None, math.nan, "text", True])
    assert made["count"] == 4
    assert made["counts"][0] == 2
    assert made["counts"][BINS // 4] == 1
    assert made["counts"][-1] == 1
    assert sum(made["counts"]) == 4
    assert (made["edges"][0], made["edges"][-1]) == (0.0, 4.0)
    assert made["mean"] == 1.25


def test_a_histogram_of_one_value_has_one_bin_and_of_none_is_none():
    assert histogram([3.0, 3.0])["counts"] == [2]
    assert histogram([None, math.inf]) is None


def test_folding_keeps_what_is_farthest_from_the_centre():
    nan = math.nan
    table = np.array([[0.1, -0.9, 0.2], [0.3, 0.4, nan], [nan, nan, nan]])
    folded = farthest(table, 0.0, 2, 2)
    assert folded[0].tolist() == [-0.9, 0.2]
    assert np.isnan(folded[1]).all()
    assert farthest(np.array([[1.0, 0.2, 1.7]]), 1.0, 1, 3).tolist() == [[0.2]]


def test_the_heat_map_has_a_line_per_row_and_no_cell_for_a_tool_s_token(made, ask):
    rows = [row(0, 1, advantages=[1.0, 2.0, 3.0], response_mask=[True, False, True])]
    rows.append(row(1, 1, tokens=2, advantages=[-1.0, 0.5]))
    write_rows(made, 3, rows)
    body = ask("/rollouts/3/heat/advantages")
    assert body["rows"] == [0, 1]
    assert body["cells"] == [[1.0, None, 3.0], [-1.0, 0.5, None]]
    assert (body["rows_per_cell"], body["tokens_per_cell"]) == (1, 1)


def test_a_large_heat_map_is_folded_and_keeps_its_outlier(made, ask):
    rows = [row(i, 1, advantages=[0.0, 0.0, 99.0 if i == 777 else 0.1]) for i in range(1000)]
    write_rows(made, 0, rows)
    body = ask("/rollouts/0/heat/advantages")
    assert len(body["cells"]) == MAX_HEAT_ROWS == 1000 / body["rows_per_cell"]
    assert body["cells"][777 // 5][2] == 99.0
    assert body["rows"][777 // 5] == 775


def test_an_unknown_column_is_not_found(made):
    write_rows(made, 0, [row(0, 1)])
    client = client_of(made.directory.parent)
    assert client.get("/api/runs/made/rollouts/0/heat/nothing").status_code == 404
    assert client.get("/api/runs/made/rollouts/9/heat/kl").status_code == 404


def test_histograms_of_a_real_run_are_those_of_its_file(client, runs):
    rows = read_jsonl(runs / "gae" / "rollouts" / "000001.jsonl")
    made = client.get("/api/runs/gae/rollouts/1/histograms").json()["histograms"]
    assert list(made) == ["score", "length", "kl", "advantages", "ratio"]
    lengths = [sum(r["response_mask"]) for r in rows]
    assert made["length"]["mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert made["advantages"]["count"] == sum(lengths) == made["ratio"]["count"]
    ratios = [
        math.exp(new - old)
        for r in rows
        for new, old in zip(r["new_log_probs"], r["old_log_probs"], strict=True)
    ]
    assert made["ratio"]["max"] == pytest.approx(max(ratios), rel=1e-4)
    assert sum(made["ratio"]["counts"]) == len(ratios)


def test_rows_show_the_columns_of_their_data(client, runs):
    answer = client.get("/api/runs/gae/rollouts/1").json()["rows"][0]
    logged = read_jsonl(runs / "gae" / "rollouts" / "000001.jsonl")[0]
    assert answer["columns"] == logged["columns"] != {}
    described = client.get("/api/runs/gae/rollouts/1/0").json()["row"]
    assert described["columns"] == logged["columns"]


def test_what_if_for_the_batch_at_its_own_settings_changes_nothing(client):
    body = client.get("/api/runs/gae/rollouts/1/whatif").json()
    assert body["own"] is True
    assert body["before"] == body["after"]
    assert body["turned"] == 0
    assert body["histograms"]["before"] == body["histograms"]["after"]
    parts = [n for name, n in body["before"].items() if name.startswith("clipped_")]
    assert body["before"]["clipped"] == sum(parts) > 0


def test_what_if_for_the_batch_adds_up_the_rows(client, runs):
    """Under another beta, rewards are those of each row by itself; clips are counted one by one."""
    rows = read_jsonl(runs / "gae" / "rollouts" / "000001.jsonl")
    change = {"kl.in_reward.coef": "0.9", "actor.update.eps_high": "0.01"}
    body = client.get("/api/runs/gae/rollouts/1/whatif", params=change).json()
    rewards = [sum(r["token_level_rewards"]) - (0.9 - r["beta"]) * sum(r["kl"]) for r in rows]
    assert body["after"]["reward"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-5)
    single = [
        client.get(f"/api/runs/gae/rollouts/1/{r['row']}/whatif", params=change).json()
        for r in rows
    ]
    marks = [mark for one in single for mark in one["clip_after"]]
    assert body["after"]["clipped"] == sum(map(bool, marks)) > body["before"]["clipped"]
    assert body["after"]["clipped_high"] == marks.count("high")
    flat = [
        x
        for r, one in zip(rows, single, strict=True)
        for x, m in zip(one["after"]["advantages"], r["response_mask"], strict=True)
        if m
    ]
    assert body["after"]["advantage_std"] == pytest.approx(np.std(flat, ddof=1), rel=1e-4)
    assert sum(body["histograms"]["after"]["counts"]) == len(flat)


def test_a_setting_that_cannot_be_is_refused_in_words(client):
    answer = client.get("/api/runs/gae/rollouts/1/whatif?advantage.gamma=7")
    assert answer.status_code == 400
    assert "gamma is '7'" in answer.json()["error"]


def test_held_out_responses_are_listed_with_their_columns(made, ask):
    said = {"response": "4", "finish_reason": "eos", "score": 1.0, "score_parts": {}}
    line = {"row": 0, "prompt": "2+2=?", "columns": {"answer": "4"}, "greedy": said, "sampled": 7}
    write_rows(made, 0, [line], folder="evals")
    assert ask()["heldout"] == [0]
    [shown] = ask("/heldout/0")["rows"]
    assert (shown["prompt"], shown["columns"]) == ("2+2=?", {"answer": "4"})
    assert shown["greedy"]["response"] == "4"
    assert shown["sampled"]["response"] is None, "damaged, and the rest is shown"


def test_a_run_without_held_out_responses_says_so(made):
    answer = client_of(made.directory.parent).get("/api/runs/made/heldout/0")
    assert answer.status_code == 404
    assert "kept no held-out responses" in answer.json()["error"]


def test_one_prompt_is_followed_through_the_iterations(made, ask, monkeypatch):
    for iteration in (0, 10, 20):
        rows = [row(i, line) for i, line in enumerate([12, 2, 2, 120])]
        rows[1]["response"] = 'says "data_line": 12, as text'
        write_rows(made, iteration, rows)
    body = ask("/history?file=data.jsonl&line=2")
    assert [(r["iteration"], r["row"]) for r in body["rows"]] == [
        (i, n) for i in (0, 10, 20) for n in (1, 2)
    ]
    assert body["next"] is None
    assert [r["row"] for r in ask("/history?line=12")["rows"]] == [0, 0, 0]
    assert ask("/history?file=another.jsonl&line=2")["rows"] == []

    monkeypatch.setattr("tether.view.samples.BYTES_PER_LOOK", 100)  # a look ends after a file
    [source] = Folder(made.directory.parent).runs().values()
    first = read_history(source, None, 2)
    assert [r["iteration"] for r in first["rows"]] == [0, 0]
    assert first["next"] == 10
    assert [r["iteration"] for r in read_history(source, None, 2, 20)["rows"]] == [20, 20]


def test_a_run_says_why_it_ended(made):
    client = client_of(made.directory.parent)

    def line() -> dict:
        return client.get("/api/runs").json()["runs"][0]

    assert (line()["state"], line()["reason"]) == ("stopped", None)
    made.append("events", {"iteration": 5, "kind": "failed", "message": "ValueError: no"})
    assert (line()["state"], line()["reason"]) == ("failed", "ValueError: no")
    made.iterate(5)
    assert line()["state"] == "stopped", "that was an earlier attempt"
    made.append("events", {"iteration": 6, "kind": "interrupted", "message": "SIGINT"})
    assert (line()["state"], line()["reason"]) == ("interrupted", "SIGINT")


def test_runs_that_differ_in_their_seed_alone_are_twins(tmp_path):
    for name, seed, lr in (("a", 0, 1), ("b", 1, 1), ("c", 1, 2)):
        run = MadeRun(tmp_path / name)
        config = f"schema: 1\nseed: {seed}\nrun: {{dir: {name}}}\nactor: {{lr: {lr}}}\n"
        (run.directory / "config.yaml").write_text(config)
    a, b, c = client_of(tmp_path).get("/api/runs").json()["runs"]
    assert a["twins"] == b["twins"] != c["twins"]
    assert [a["seed"], b["seed"]] == [0, 1]
    assert a["stage"] == "ppo"
