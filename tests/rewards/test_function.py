import numpy as np
import pytest

from tether.errors import UserError
from tether.rewards.function import call_reward, check_arguments, load_reward
from tether.rewards.rules import exact_answer

ROW = {"prompt": "1+1=?", "response": "2", "finished": True, "answer": "2"}


@pytest.mark.parametrize(
    ("response", "finished", "score"),
    [("2", True, 1.0), ("2", False, 0.0), ("3", True, 0.0), (" 2", True, 0.0), ("", True, 0.0)],
)
def test_the_exact_answer_scores_one_only_if_the_model_ended_it_itself(response, finished, score):
    assert exact_answer(response, "2", finished) == score


def test_a_function_gets_the_arguments_it_names():
    assert call_reward(lambda answer, response: float(answer == response), ROW) == 1.0
    assert call_reward(lambda **row: len(row), ROW) == 4.0
    assert call_reward(lambda prompt, bonus=2: bonus, ROW) == 2.0


@pytest.mark.parametrize("number", [1, True, np.float32(1), np.int64(1)])
def test_any_finite_number_is_a_score(number):
    assert call_reward(lambda: number, ROW) == 1.0


def test_none_stays_none():
    assert call_reward(lambda: None, ROW) is None


@pytest.mark.parametrize("bad", ["1", float("nan"), float("inf"), [1.0], {}, 1j, 10**400])
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
        ("exact_anwser", "no rule that ships.*exact_answer"),
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


def test_a_reward_that_asks_for_a_missing_column_is_refused_before_training():
    rows = [{"answer": "2", "solution": "2"}, {"answer": "2"}]  # the second lacks it
    with pytest.raises(UserError, match=r"asks for 'solution'.*d\.jsonl, line 2.*answer"):
        check_arguments(lambda response, solution: 0, rows, "d.jsonl")
    check_arguments(lambda response, answer, finished, extra=1, **rest: 0, rows, "d.jsonl")
