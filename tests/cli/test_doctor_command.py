"""`tether doctor`: which run, what it prints, how it exits."""

import json
import os

import pytest

WELL = {
    "score/mean": 0.5, "score/std": 0.5, "response/length_mean": 6.0, "response/eos_rate": 1.0,
    "actor/approx_kl": 0.03,
}  # fmt: skip


def write(run, iterations=12, events=(), **metrics):
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("schema: 1\n")
    lines = [{"schema": 1, "iteration": i, **WELL, **metrics} for i in range(iterations)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def test_a_run_that_is_well_exits_with_0(tether, tmp_path):
    code, out, _ = tether("doctor", write(tmp_path / "well"))
    assert code == 0
    assert "Nothing found by 9 of 19 rules." in out
    assert "kl_explodes: needs kl/token_mean, which the run does not have" in out
    assert "note: evals.jsonl is missing." in out


def test_a_trouble_is_named_with_its_numbers_fields_and_link_and_exits_with_1(tether, tmp_path):
    run = write(tmp_path / "cut", **{"response/eos_rate": 0.25})
    code, out, _ = tether("doctor", run)
    assert code == 1
    assert "1. Many responses are cut off at the limit before they end." in out
    assert "evidence: response/eos_rate 0.25 at iteration 0, 0.25 at iteration 11" in out
    assert "fields: rollout.max_response_tokens, advantage.truncation" in out
    assert "more: docs/troubleshooting.md#responses-cut-off" in out
    assert "1 found by" in out
    code, out, _ = tether("doctor", run, "--lang", "zh")
    assert "很多回答没写完就被截断。" in out


def test_the_newest_run_is_taken_where_none_is_named(tether, tmp_path):
    old, new = (write(tmp_path / "runs" / name) for name in ("b-old", "a-new"))
    for file in old.iterdir():
        os.utime(file, (1, 1))
    _, out, _ = tether("doctor")
    assert out.splitlines()[0] == "runs/a-new"
    assert new.is_dir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "There is no run in runs/ yet; name one, or make one by `tether train`."),
        (["nowhere"], "nowhere is not a folder; name a run, `tether runs` lists them."),
        (["."], ". is not a run: there is no config.yaml in it."),
    ],
)
def test_no_run_is_said_in_a_sentence(tether, words, said):
    code, _, err = tether("doctor", *words)
    assert (code, err) == (2, f"tether: {said}\n")


def test_json_holds_all_of_it(tether, tmp_path):
    run = write(tmp_path / "cut", **{"response/eos_rate": 0.25})
    code, out, _ = tether("doctor", run, "--json", "found.json")
    record = json.loads((tmp_path / "found.json").read_text())
    assert code == 1
    assert "found.json" in out
    assert [finding["rule"] for finding in record["findings"]] == ["truncation"]
    assert record["run"] == str(run)
    assert record["not_judged"]["kl_explodes"].startswith("needs kl/token_mean")


def test_what_an_event_says_cannot_steer_the_terminal(tether, tmp_path):
    event = {"schema": 1, "iteration": 3, "kind": "stopped", "message": "a\x1b[2Jb\n\u202ec"}
    code, out, _ = tether("doctor", write(tmp_path / "odd", events=[event]))
    assert code == 1
    assert "it says: a\\x1b[2Jb\\n\\u202ec" in out
    assert "\x1b" not in out


def test_a_run_says_at_its_end_what_the_doctor_found(tether, tiny_config, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({**tiny_config, "train": {"iterations": 3}}))
    code, out, _ = tether("train", recipe, "--run.dir", "out")
    assert code == 0
    [line] = [line for line in out.splitlines() if line.startswith("doctor ")]
    assert line.endswith(("See: tether doctor out", "rules."))
    assert "truncation" in line  # a random model does not end its responses
