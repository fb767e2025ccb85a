import numpy as np
import pytest
from helpers import table

from tether.errors import UserError, describe
from tether.rewards.functions import (
    RewardPart,
    call_reward,
    load_reward,
    required_columns,
    signature_of,
)
from tether.rewards.rules import exact_answer
from tether.rewards.workers import ChildScorer

ROW = {"prompt": "1+1=?", "response": "2", "finished": True, "answer": "2"}


@table(
    ("response", "finished", "score"),
    [("2", True, 1.0), ("2", False, 0.0), ("3", True, 0.0), (" 2", True, 0.0), ("", True, 0.0)],
)
def test_the_exact_answer_scores_one_only_if_the_model_ended_it_itself(response, finished, score):
    assert exact_answer(response, "2", finished) == score


def test_a_function_gets_the_arguments_it_names():
    assert call_reward(lambda answer, response: float(answer == response), ROW) == 1.0
    assert call_reward(lambda **row: len(row), ROW) == 4.0
    assert call_reward(lambda prompt, bonus=2: bonus, ROW) == 2.0


@table("number", [1, True, np.float32(1), np.int64(1)])
def test_any_finite_number_is_a_score(number):
    assert call_reward(lambda: number, ROW) == 1.0


def test_none_stays_none():
    assert call_reward(lambda: None, ROW) is None


@table(
    "bad",
    ["1", float("nan"), float("inf"), [1.0], {}, 1j, np.complex64(1 + 2j), np.array(1j), 10**400],
)
def test_what_is_no_finite_number_is_an_error(bad):
    """Trap 17."""
    with pytest.raises((TypeError, ValueError, OverflowError)):
        call_reward(lambda: bad, ROW)


def test_a_rule_is_found_by_name_and_a_function_by_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def half(response):\n    return 0.5\n")
    assert load_reward("exact_answer") is exact_answer
    assert load_reward(f"{file}:half")("x") == 0.5


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("exact_anwser", "not a rule that ships.*exact_answer"),
        ("{}/nowhere.py:f", "not a file"),
        ("{}/mine.py:missing", "has no function 'missing'"),
        ("{}/mine.py:number", "has no function 'number'"),
        ("{}/broken.py:f", "does not import: ZeroDivisionError"),
    ],
)
def test_a_reward_that_cannot_be_found_is_refused(tmp_path, kind, reason):
    (tmp_path / "mine.py").write_text("number = 3\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=reason):
        load_reward(kind.format(tmp_path))


CHAT = [{"role": "user", "content": "1+1=?"}]
VERL = {**ROW, "data_source": "sums", "ground_truth": "2", "extra_info": {"index": 7}}


def verl_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("sums", {"index": 7})
    return float(solution_str == ground_truth)


def verl_any(solution_str, ground_truth, **rest):
    return {"score": float(len(rest)), "names": sorted(rest)}


def trl_text(prompts, completions, answer, **kwargs):
    assert (prompts, completions, answer) == (["1+1=?"], ["2"], ["2"])
    assert "prompt" not in kwargs
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def trl_chat(completions, **kwargs):
    assert kwargs["prompts"] == [CHAT]
    return [len(completion[0]["content"]) for completion in completions]


def test_verls_signature_is_known_by_its_names():
    assert signature_of(verl_score) == "verl"
    assert call_reward(verl_score, VERL) == 1.0
    assert call_reward(verl_any, {**VERL, "other": 1}) == 2.0  # data_source and extra_info only
    assert required_columns(verl_score) == ["data_source", "ground_truth"]
    assert required_columns(verl_any) == ["ground_truth"]


def test_trls_signature_is_known_by_its_names_and_gets_lists():
    assert signature_of(trl_text) == signature_of(trl_chat) == "trl"
    assert call_reward(trl_text, ROW) == 1.0
    assert call_reward(trl_chat, {**ROW, "prompt": CHAT, "response": "two"}) == 3.0
    assert required_columns(trl_text) == ["answer"]
    assert required_columns(trl_chat) == []


@table(
    ("returned", "reason"),
    [(1.0, "float, not a list"), ([1.0, 2.0], "2 scores for 1"), ([], "0 scores"), (["1"], "str")],
)
def test_a_trl_reward_returns_a_score_a_completion(returned, reason):
    with pytest.raises((TypeError, ValueError), match=reason):
        call_reward(lambda completions: returned, ROW)
    assert call_reward(lambda completions: [None], ROW) is None
    assert call_reward(lambda completions: np.array([2.5]), ROW) == 2.5


def test_constants_are_no_columns_and_come_before_columns_of_their_name():
    def reward(response, answer, bonus):
        return bonus if response == answer else 0

    assert required_columns(reward, {"bonus": 3}) == ["answer"]
    assert call_reward(reward, {**ROW, "bonus": 9}, {"bonus": 3}) == 3.0
    assert call_reward(lambda completions, scale, **rest: [scale], ROW, {"scale": 4}) == 4.0
    assert call_reward(lambda solution_str, scale: scale, ROW, {"scale": 5}) == 5.0


def test_a_file_may_define_dataclasses_that_look_their_module_up(tmp_path):
    file = tmp_path / "typed.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import KW_ONLY, dataclass\n"
        "@dataclass\nclass A:\n    _: KW_ONLY\n    x: int = 2\n"
        "def f():\n    return A(x=3).x\n"
    )
    assert load_reward(f"{file}:f")() == 3


@pytest.mark.parametrize("when", ["at the top", "when called"])
def test_a_file_may_import_the_file_beside_it(tmp_path, when):
    """Even one whose name others have as well: the tests' own helpers.py is importable here."""
    (tmp_path / "helpers.py").write_text("def count(text): return len(text)\n")
    top = "from helpers import count\ndef f(response): return count(response)\n"
    called = "def f(response):\n    from beside_me import count\n    return count(response)\n"
    (tmp_path / "beside_me.py").write_text("def count(text): return len(text)\n")
    (tmp_path / "mine.py").write_text(top if when == "at the top" else called)
    scorer = ChildScorer([RewardPart(f"{tmp_path}/mine.py:f")], 5.0)
    assert [v.score for v in scorer.score([{"response": "four"}])] == [4.0]
    scorer.close()


def test_a_module_is_named_with_dots(tmp_path, monkeypatch):
    package = tmp_path / "my_rewards_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "scale.py").write_text("FACTOR = 3\n")
    (package / "own.py").write_text(
        "from my_rewards_package.scale import FACTOR\ndef f(response): return FACTOR\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load_reward("my_rewards_package.own:f")("x") == 3
    scorer = ChildScorer([RewardPart("my_rewards_package.own:f")], 5.0)
    assert [v.score for v in scorer.score([{"response": "x"}])] == [3.0]
    scorer.close()
    with pytest.raises(UserError, match=r"names the module my_rewards_package\.none, which is"):
        load_reward("my_rewards_package.none:f")
    with pytest.raises(UserError, match=r"my_rewards_package\.own has no function 'g'"):
        load_reward("my_rewards_package.own:g")


def test_an_error_of_tethers_own_names_no_line():
    """The sentence says it; a line inside a library or inside tether helps nobody."""
    with pytest.raises(ValueError, match="nan") as raised:
        call_reward(lambda: float("nan"), ROW)
    assert describe(raised.value) == "ValueError: the reward returned nan"
