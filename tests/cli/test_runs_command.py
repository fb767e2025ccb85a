"""`tether runs`: one odd run does not hide the others."""

import json

import pytest


def write(run, metrics, evals=()):
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("schema: 1\n")
    for name, records in (("metrics.jsonl", metrics), ("evals.jsonl", evals)):
        (run / name).write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def good(tmp_path):
    write(tmp_path / "runs" / "good", [{"iteration": 0, "score/mean": 0.25, "kl/sequence_mean": 1}])


@pytest.mark.usefixtures("good")
def test_a_number_that_was_not_finite_is_a_dash(tether, tmp_path):
    metrics = [{"iteration": 0, "score/mean": None, "kl/sequence_mean": None}]
    evals = [{"iteration": 0, "sampled": {"mean": None, "binary": False}}]
    write(tmp_path / "runs" / "odd", metrics, evals)
    code, out, _ = tether("runs")
    assert code == 0
    assert out.splitlines()[2].split() == ["runs/good", "1", "0.250", "1.000", "–", "–"]
    assert out.splitlines()[3].split() == ["runs/odd", "1", "–", "–", "–", "–"]


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize("content", ["{half", "[]\n", '{"iteration": 0, "score/mean": "x"}\n'])
def test_a_damaged_run_does_not_hide_the_others(tether, tmp_path, content):
    write(tmp_path / "runs" / "bad", [])
    (tmp_path / "runs" / "bad" / "metrics.jsonl").write_text(content + "\n")
    code, out, _ = tether("runs")
    assert code == 0
    assert "runs/good" in out
    assert out.splitlines()[2].split() == ["runs/bad", *"?????"]
    assert "not read: runs/bad" in out


def test_a_run_of_sft_shows_its_loss(tether, tmp_path):
    evals = [{"iteration": 0, "loss": 2.0}, {"iteration": 9, "loss": 0.5}]
    write(tmp_path / "runs" / "sft-001", [{"iteration": 8, "loss": 0.625}], evals)
    _, out, _ = tether("runs")
    assert out.splitlines()[2].split() == [
        "runs/sft-001", "1", "loss", "0.625", "–", "loss", "2.000", "loss", "0.500"
    ]  # fmt: skip


@pytest.mark.usefixtures("good")
def test_the_name_of_a_run_cannot_steer_the_terminal(tether, tmp_path):
    write(tmp_path / "runs" / "a\x1b[2Jb\n\u202e", [])
    _, out, _ = tether("runs")
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "runs/a\\x1b[2Jb\\n\\u202e" in out
