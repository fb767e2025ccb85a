"""`tether diff`: settings, metrics and held-out scores of two runs; runs that are not whole."""

import json

import pytest
import yaml


def write(run, config, scores=(0.25, 0.75, 0.5), evals=()):
    run.mkdir(parents=True)
    (run / "rollouts").mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump({"schema": 1, **config}))
    metrics = [
        {"schema": 1, "iteration": i, "score/mean": s, "actor/lr": 0.1}
        for i, s in enumerate(scores)
    ]
    for name, lines in (("metrics", metrics), ("evals", evals), ("events", ())):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / f"{name}.jsonl").write_text(text)


def held(iteration, mean, half):
    one = {"mean": mean, "low": mean - half, "high": mean + half, "count": 9, "binary": True}
    return {"schema": 1, "iteration": iteration, "sampled": one, "greedy": one, "kl": 0.0}


SUMS = {"reward": {"kind": "exact_answer"}, "actor": {"lr": 0.001, "update": {"kind": "clip"}}}


def cells(out: str, first: str) -> list[str]:
    [line] = [line for line in out.splitlines() if line.strip().startswith(first)]
    return [cell.strip() for cell in line.split("   ") if cell.strip()]


def test_what_differs_is_shown_side_by_side(tether, tmp_path):
    write(tmp_path / "a", SUMS, evals=[held(0, 0.5, 0.1), held(3, 0.6, 0.1)])
    other = {**SUMS, "actor": {"lr": 0.002, "update": {"kind": "clip", "eps_low": 0.1}}}
    write(tmp_path / "b", other, (0.5, 1.0), evals=[held(0, 0.5, 0.1), held(2, 0.9, 0.1)])
    code, out, _ = tether("diff", "a", "b")
    assert code == 0
    assert cells(out, "actor.lr") == ["actor.lr", "0.001", "0.002"]
    assert cells(out, "actor.update.eps_low") == ["actor.update.eps_low", "–", "0.1"]
    assert "actor.update.kind" not in out
    assert cells(out, "score/mean  ") == ["score/mean", "0.5 at 2", "1 at 1", "+0.5"]
    assert cells(out, "score/mean, best") == ["score/mean, best", "0.75 at 1", "1 at 1", "+0.25"]
    assert cells(out, "sampled, last") == [
        "sampled, last", "60.0% (50.0% – 70.0%) at 3", "90.0% (80.0% – 100.0%) at 2",
        "+30.0 points, intervals apart",
    ]  # fmt: skip
    assert "intervals overlap" in "".join(cells(out, "sampled, first"))
    assert "tasks differ" not in out
    assert "actor/lr" not in out.replace("actor.lr", "")
    assert "actor/lr" in tether("diff", "a", "b", "--all")[1]


def test_runs_of_different_tasks_are_said_to_be(tether, tmp_path):
    write(tmp_path / "a", {**SUMS, "data": {"train": "sums.jsonl"}})
    write(tmp_path / "b", {"reward": {"kind": "length"}, "data": {"train": "words.jsonl"}})
    _, out, _ = tether("diff", "a", "b")
    assert " ".join(out.split()).startswith(
        "The tasks differ (data.train, reward.kind): scores of one are not scores of the other."
    )


def test_equal_runs_have_equal_settings(tether, tmp_path):
    for parent in ("one", "two"):
        write(tmp_path / parent / "a", SUMS)
    _, out, _ = tether("diff", "one/a", "two/a")
    assert "The settings are the same." in out
    assert "Neither run was evaluated" in out
    assert "one/a" in out


def test_a_run_that_has_just_begun_or_is_damaged_shows_the_rest(tether, tmp_path):
    write(tmp_path / "a", SUMS, ())
    write(tmp_path / "b", SUMS)
    (tmp_path / "b" / "config.yaml").write_text("a: [1\n")
    (tmp_path / "b" / "evals.jsonl").write_text("half\n")
    code, out, _ = tether("diff", "a", "b")
    assert code == 0
    assert cells(out, "score/mean  ") == ["score/mean", "–", "0.5 at 2", "–"]
    assert "note: b: config.yaml cannot be read" in out
    assert "note: b: evals.jsonl, line 1: not a JSON object" in out
    assert "tasks differ" not in out


@pytest.mark.parametrize("words", [("a", "nowhere"), ("nowhere", "a")])
def test_a_missing_run_is_said_in_a_sentence(tether, tmp_path, words):
    write(tmp_path / "a", SUMS)
    code, _, err = tether("diff", *words)
    assert code == 2
    assert err == "tether: nowhere is not a folder; name a run, `tether runs` lists them.\n"


def test_a_setting_cannot_steer_the_terminal(tether, tmp_path):
    write(tmp_path / "a", {"x": "\x1b[2J\u202e" + "y" * 1000})
    write(tmp_path / "b", {"x": 1})
    _, out, _ = tether("diff", "a", "b")
    assert "\x1b" not in out
    assert "\\x1b[2J" in out
    assert max(map(len, out.splitlines())) < 200
