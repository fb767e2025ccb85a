"""`tether examples` as a person meets it."""

import json
from pathlib import Path

import pytest

from tether.explain import example_sums


@pytest.mark.parametrize(
    ("language", "mistake", "verdict"),
    [
        ("en", "✗ A common mistake (forecaster): −0.064 bits", "All 93 examples agree"),
        ("zh", "✗ 常见错误（天气预报员）：−0.064 比特", "全部 93 个例子都与正确答案一致"),
    ],
)
def test_it_prints_numbers_right_answers_and_mistakes(tether, language, mistake, verdict):
    code, out, _ = tether("examples", "--lang", language)
    assert code == 0
    assert out.count("0.044403   0.064060") == 2  # computed, and right
    assert mistake in out
    assert verdict in out


def test_its_json_holds_every_example(tether):
    code, out, _ = tether("examples", "--json", "e.json")
    assert code == 0
    assert "→ e.json" in out
    record = json.loads(Path("e.json").read_text(encoding="utf-8"))
    assert (record["schema"], len(record["examples"])) == (1, 93)
    assert all(e["agrees"] and e["difference"] <= 1e-6 for e in record["examples"])
    by_id = {e["id"]: e for e in record["examples"]}
    assert by_id["kl-ruled-out"]["right"][:2] == [None, None]  # JSON has no infinity
    assert by_id["sequence-kl"]["mistake"].startswith("0.7 bits for the response.")


def test_a_wrong_number_is_marked_and_the_exit_code_is_1(tether, monkeypatch):
    monkeypatch.setattr(example_sums, "optimizer_steps", lambda *counts: [63.0])
    code, out, _ = tether("examples", "--json", "e.json")
    assert code == 1
    assert "steps ✗" in out
    assert "3 of 93 examples differ" in out
    examples = json.loads(Path("e.json").read_text(encoding="utf-8"))["examples"]
    wrong = [e["id"] for e in examples if not e["agrees"]]
    assert wrong == ["steps", "steps-one-epoch", "steps-ragged"]


def test_a_folder_that_is_not_there_gets_one_sentence(tether):
    code, _, err = tether("examples", "--json", "no/e.json")
    assert code == 2
    assert err == "tether: no/e.json cannot be written: no such file or directory.\n"
