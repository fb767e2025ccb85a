"""The rules that ship, case by case."""

import inspect
from decimal import Decimal
from pathlib import Path

import pytest
from helpers import table

from tether.errors import UserError
from tether.rewards.functions import RewardPart, call_reward
from tether.rewards.rules import (
    RULES,
    check_constants,
    exact_match,
    follows_format,
    last_number,
    length,
    math_verify,
    number_match,
    regex,
)
from tether.rewards.workers import ChildScorer

REWARDS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"


@table(
    ("response", "answer", "score"),
    [
        ("Paris", "paris", 1.0),
        ("  The  Hague.\n", "the hague", 1.0),
        ("Ｐａｒｉｓ。", "Paris", 1.0),
        ("Straße", "STRASSE", 1.0),
        ("Paris, France", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("no", ["nope", "No"], 1.0),
        ("maybe", ["yes", "no"], 0.0),
        ("4", 4, 1.0),
    ],
)
def test_exact_match_looks_past_case_space_and_a_full_stop(response, answer, score):
    assert exact_match(response, answer) == score


@table(
    ("text", "number"),
    [
        ("so 3 + 4 = 7", "7"),
        ("#### 1,234.50", "1234.50"),
        ("7-3", "3"),  # a difference
        ("it is -3.", "-3"),
        ("(2)-5", "5"),
        ("1,2,3", "3"),  # a list, not thousands
        ("x=.5", "0.5"),
        ("答案是４２", "42"),
        ("\u22125 degrees", "-5"),
        ("$1,000,000", "1000000"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@table(
    ("response", "answer", "tolerance", "score"),
    [
        ("The answer is 72.", "#### 72", 0, 1.0),
        ("72.0", 72, 0, 1.0),
        ("First 72, then 71", "72", 0, 0.0),
        ("3.14", "3.14159", 0.01, 1.0),
        ("3.14", "3.14159", 0.001, 0.0),
        ("0.3", 0.1, 0.2, 1.0),  # in decimals the difference is exactly the tolerance
        ("I do not know", "72", 0, 0.0),
    ],
)
def test_number_match_compares_the_last_numbers(response, answer, tolerance, score):
    assert number_match(response, answer, tolerance) == score


def test_an_answer_without_a_number_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="'seven' holds no number"):
        number_match("7", "seven")


@table(
    ("response", "answer", "score"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("The answer is 0.5.", "\\frac{1}{2}", 1.0),
        ("$x = 1 + y$", "$x = y + 1$", 1.0),
        ("$\\{2, 1\\}$", "{1,2}", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("no idea", "4", 0.0),
        ("12", 12, 1.0),
        ("__import__('os').abort()", "4", 0.0),
    ],
)
def test_math_verify_compares_as_mathematics(response, answer, score):
    assert math_verify(response, answer) == score


@table(
    ("response", "pattern", "score"),
    [("ab12", r"\d+", 1.0), ("ab", r"\d+", 0.0), ("ab\ncd", r"^cd$", 0.0), ("cd", r"^cd$", 1.0)],
)
def test_regex_is_found_or_not(response, pattern, score):
    assert regex(response, pattern) == score


@table(
    ("size", "score"), [(0, 0.0), (2, 0.5), (4, 1.0), (7, 1.0), (10, 1.0), (20, 0.5), (40, 0.25)]
)
def test_length_is_one_inside_its_bounds_and_a_ratio_outside(size, score):
    assert length("x" * size, at_most=10, at_least=4) == score


@table(
    ("response", "score"),
    [
        ("<think>a\nb</think>\n<answer>2</answer>", 1.0),
        (" <think></think><answer></answer> ", 1.0),
        ("<answer>2</answer><think>a</think>", 0.0),  # in another order
        ("<think>a</think>", 0.0),
        ("so <think>a</think><answer>2</answer>", 0.0),
        ("<think>a</think> hm <answer>2</answer>", 0.0),
        ("<think>a</think><answer>2</answer><answer>3</answer>", 0.0),
        ("<think><think>a</think><answer>2</answer>", 0.0),
        ("<think>a</think><answer>2", 0.0),
    ],
)
def test_format_wants_every_tag_once_in_order(response, score):
    assert follows_format(response, tags=["think", "answer"]) == score


def test_format_by_pattern_is_of_the_whole_response():
    assert follows_format("a\nb: 12", pattern=r".*: \d+") == 1.0
    assert follows_format("a: 12.", pattern=r".*: \d+") == 0.0


@table(
    ("kind", "arguments", "reason"),
    [
        ("regex", {"pattern": "("}, r"regex cannot read its pattern '\('"),
        ("regex", {"pattern": 5}, "cannot read its pattern 5"),
        ("format", {}, "needs either `tags` or `pattern`"),
        ("format", {"tags": ["a"], "pattern": "a"}, "needs either"),
        ("format", {"tags": "think"}, "list of names"),
        ("format", {"tags": []}, "list of names"),
        ("length", {"at_most": "ten"}, "number for at_most, not 'ten'"),
        ("number_match", {"tolerance": True}, "number for tolerance"),
    ],
)
def test_constants_that_a_rule_would_stumble_over_are_refused(kind, arguments, reason):
    with pytest.raises(UserError, match=reason):
        check_constants(kind, arguments)


@table("name", RULES)
def test_the_page_on_rewards_says_what_the_docstring_says(name):
    """The docstring is where a rule is defined; the page quotes it."""
    page = " ".join(REWARDS_PAGE.read_text(encoding="utf-8").split())
    assert f"`{name}`" in page
    assert " ".join(inspect.getdoc(RULES[name]).split()).removeprefix("Return ") in page


@table(
    ("rule", "response", "answer", "score"),
    [
        ("exact_answer", "2", 2, 1.0),
        ("exact_answer", "2", 2.0, 1.0),
        ("exact_answer", "2.5", 2.5, 1.0),
        ("exact_answer", "3", 2, 0.0),
        ("exact_answer", "two", ["2", "two"], 1.0),
        ("exact_answer", "2", ["two", 2], 1.0),
        ("exact_answer", "3", ["2", "two"], 0.0),
        ("exact_match", "2", 2.0, 1.0),
        ("number_match", "it is 3", [2, "3 apples"], 1.0),
        ("number_match", "it is 2", [2, "3 apples"], 1.0),
        ("number_match", "it is 4", [2, "3 apples"], 0.0),
        ("math_verify", "\\boxed{\\frac{1}{2}}", ["1", "0.5"], 1.0),
        ("math_verify", "\\boxed{2}", ["1", "0.5"], 0.0),
        ("math_verify", "3", [3], 1.0),
    ],
)
def test_a_number_or_one_of_a_list_is_a_right_answer(rule, response, answer, score):
    """As JSON has them. They were compared with the spelling of a whole list, and scored 0."""
    row = {"response": response, "answer": answer, "finished": True, "prompt": "?"}
    assert call_reward(RULES[rule], row) == score


@table("rule", ["exact_answer", "exact_match", "number_match", "math_verify"])
def test_an_empty_list_of_answers_is_an_error_and_no_zero(rule):
    row = {"response": "2", "answer": [], "finished": True, "prompt": "?"}
    with pytest.raises(ValueError, match="the answer is"):
        call_reward(RULES[rule], row)


@table(
    ("rule", "answer"), [("exact_answer", 2), ("exact_answer", ["two", "2"]), ("math_verify", [2])]
)
def test_numbers_and_lists_are_right_answers_where_rewards_run(rule, answer):
    """In their own process, where nothing checks the types: there they scored 0 without a word."""
    scorer = ChildScorer([RewardPart(rule)], timeout_seconds=20.0)
    rows = [{"response": r, "answer": answer, "finished": True, "prompt": "?"} for r in "23"]
    assert [verdict.score for verdict in scorer.score(rows)] == [1.0, 0.0]
    scorer.close()


@table(
    ("response", "compound"),
    [  # the numbers of VADER's own README
        ("VADER is smart, handsome, and funny.", 0.8316),
        ("VADER is smart, handsome, and funny!", 0.8439),
        ("VADER is not smart, handsome, nor funny.", -0.7424),
        ("The book was good.", 0.4404),
        ("At least it isn't a horrible book.", 0.431),
        ("Today only kinda sux! But I'll get by, lol", 0.5249),
        ("", 0.0),
    ],
)
def test_sentiment_is_the_lexicons_compound_score(response, compound):
    assert RULES["sentiment"](response) == pytest.approx(compound, abs=5e-5)


@table(
    ("response", "words", "share"),
    [
        ("great great great", 2, 1 / 2),  # two runs, one of them new
        ("Great! great, GREAT", 1, 2 / 3),
        ("the cat saw the cat", 2, 1 / 4),  # the cat, cat saw, saw the, the cat
        ("the cat saw the dog", 2, 0.0),
        ("a", 2, 0.0),
        ("", 1, 0.0),
        ("don't don’t don't", 1, 1 / 3),
    ],
)
def test_repetition_is_the_share_of_runs_that_stood_there_before(response, words, share):
    assert RULES["repetition"](response, words=words) == pytest.approx(share)


def test_sentiment_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setattr("tether.rewards.rules.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"vaderSentiment.*\.\[sentiment\]"):
        check_constants("sentiment", {})


def test_repetition_needs_a_positive_number_of_words():
    for words in (0, True, "two"):
        with pytest.raises(UserError, match="1 or more for words"):
            check_constants("repetition", {"words": words})
