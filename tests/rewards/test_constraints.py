"""Every kind of constraint, by responses that keep it and responses that do not."""

import pytest
from helpers import table

from tether.rewards.constraints import KINDS, kept
from tether.rewards.rules import RULES

CASES = [
    ("max_words", 3, ["One two three.", "don't stop"], ["one two three four", "", "..."]),
    ("min_words", 2, ["two words", "now three words"], ["one", "", "well-known"]),
    (
        "sentences",
        2,
        ["It rains. I read!", "Is it? Yes."],
        ["It rains.", "A. B. C.", "It rains. I"],
    ),
    ("bullets", 2, ["- a\n- b", "* a\n\n• b"], ["- a", "Here:\n- a\n- b", "- a\n- b\n- c", "a\nb"]),
    ("lowercase", None, ["all small, 3.", "ok"], ["One", "123", ""]),
    ("uppercase", None, ["ALL LARGE, 3."], ["One", "123", ""]),
    ("no_commas", None, ["a and b"], ["a, b", "甲，乙", ""]),
    (
        "begins_with",
        "I think",
        ["I think so", '"i THINK," she said'],
        ["We think", "I thinker", "I"],
    ),
    ("ends_with", "at last", ["Home at last.", "AT LAST"], ["at last we", "great last", "last"]),
    ("contains", "old", ["An Old man", "old."], ["cold", "older", ""]),
    ("avoids", "old", ["a cold man"], ["An old man", ""]),
    ("quoted", None, ['"Hello there."', "“Hello.”"], ['"Hello', 'a "b" c', '"a" "b"', '""']),
    ("language", "english", ["Hello!"], ["Hello, 你好", "привет", "123"]),
    ("language", "chinese", ["你好。"], ["你好 hello"]),
    ("language", "russian", ["привет"], ["hello"]),
    (
        "json_keys",
        ["a", "b"],
        ['{"b": 1, "a": [2]}'],
        ['{"a": 1}', 'x {"a": 1, "b": 2}', "[]", "{"],
    ),
    ("title", None, ["<<Rain>>\nIt fell.", "It fell <<now>>"], ["<Rain>", "<<a>> <<b>>", "<<>>"]),
    ("no_letter", "z", ["a cat"], ["a Zoo", ""]),
]


@table(("kind", "value", "good", "bad"), CASES)
def test_a_response_keeps_a_constraint_or_does_not(kind, value, good, bad):
    constraint = {"kind": kind} if value is None else {"kind": kind, "value": value}
    assert [kept(response, constraint) for response in good] == [True] * len(good)
    assert [kept(response, constraint) for response in bad] == [False] * len(bad)


def test_every_kind_has_cases_and_there_are_at_least_twelve():
    assert {kind for kind, *_ in CASES} == set(KINDS)
    assert len(KINDS) >= 12


def test_the_share_of_constraints_is_the_score_and_a_response_that_was_cut_has_none():
    row = [{"kind": "lowercase"}, {"kind": "no_commas"}, {"kind": "max_words", "value": 2}]
    share, every = RULES["constraints"], RULES["all_constraints"]
    assert share("one two three", row, finished=True) == pytest.approx(2 / 3)
    assert share("one two three", row, finished=False) == 0
    assert every("one two three", row, finished=True) == 0
    assert every("one two", row, finished=True) == 1
    assert every("one two", row, finished=False) == 0


@table(
    "constraint",
    [
        {"kind": "rhymes"},
        {"kind": "max_words"},
        {"kind": "max_words", "value": True},
        {"kind": "max_words", "value": 0},
        {"kind": "lowercase", "value": 1},
        {"kind": "contains", "value": " "},
        {"kind": "language", "value": "klingon"},
        {"kind": "json_keys", "value": "a"},
        "lowercase",
    ],
)
def test_a_broken_constraint_is_an_error_and_not_a_score(constraint):
    with pytest.raises(ValueError, match="constraint"):
        kept("text", constraint)
    with pytest.raises(ValueError, match="not a list"):
        RULES["constraints"]("text", [], finished=True)
