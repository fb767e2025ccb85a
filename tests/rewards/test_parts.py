"""Several rewards as one: weights, names, constants, and who is to blame."""

import pytest
from helpers import table

from tether.config import RewardSection
from tether.errors import UserError
from tether.rewards.functions import RewardPart, columns_for_reward, load_part, parts_of
from tether.rewards.scorers import Verdict, weighted_sum
from tether.rewards.workers import ChildScorer

FILE = """
import os, time

def right(response, answer):
    return float(response == answer)

def size(response, per=1.0):
    return len(response) * per

def picky(response):
    if response == "hang":
        time.sleep(60)
    if response == "die":
        os._exit(3)
    if response == "raise":
        raise ValueError("no")
    return None if response == "shrug" else 1.0

def meddle(prompt, extra):
    extra["seen"] = True
    return 0.0

def look(extra):
    return float("seen" in extra)
"""


@pytest.fixture
def file(tmp_path) -> str:
    path = tmp_path / "r.py"
    path.write_text(FILE)
    return str(path)


def row(response: str, answer: str = "yes") -> dict:
    return {"prompt": "p", "response": response, "finished": True, "answer": answer, "extra": {}}


def test_the_score_is_the_weighted_sum_and_every_part_is_kept(file):
    parts = [
        RewardPart(f"{file}:right", {}, 2.0, "right"),
        RewardPart(f"{file}:size", {"per": 0.5}, -0.1, "s"),
    ]
    scorer = ChildScorer(parts, 5.0)
    first, second = scorer.score([row("yes"), row("no")])
    scorer.close()
    assert first.score == pytest.approx(2.0 * 1 - 0.1 * 1.5)
    assert first.parts == {"right": 1.0, "s": 1.5}
    assert second.score == pytest.approx(-0.1)
    assert second.parts == {"right": 0.0, "s": 1.0}


def test_a_reward_alone_has_no_parts_and_no_rounding():
    verdict = weighted_sum([RewardPart("exact_answer")], [Verdict(0.1)])
    assert verdict == Verdict(0.1)


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ("raise", "part 'picky': ValueError: no"),
        ("shrug", "part 'picky': the reward returned None"),
        ("hang", "part 'picky': the reward took longer than 0.5 s"),
        ("die", "part 'picky': the reward's process ended with code 3"),
    ],
)
def test_a_part_that_fails_is_named_and_the_next_row_is_scored(file, response, problem):
    """Whatever it did: each row's answers still belong to that row."""
    names = ("size", "picky", "right")
    scorer = ChildScorer([RewardPart(f"{file}:{name}", {}, 1.0, name) for name in names], 0.5)
    bad, good = scorer.score([row(response), row("yes")])
    scorer.close()
    assert bad.score is None
    assert bad.parts == {}
    assert problem in bad.problem
    assert good == Verdict(5.0, parts={"size": 3.0, "picky": 1.0, "right": 1.0})


def test_a_sum_beyond_all_numbers_is_no_score():
    verdict = weighted_sum([RewardPart("a", {}, 1e300, "a")], [Verdict(1e15)])
    assert verdict.score is None
    assert "weighted sum" in verdict.problem


def test_no_part_can_change_what_the_next_one_sees(file):
    scorer = ChildScorer(
        [RewardPart(f"{file}:meddle", name="m"), RewardPart(f"{file}:look", name="l")], 5.0
    )
    [verdict] = scorer.score([row("x")])
    scorer.close()
    assert verdict.parts == {"m": 0.0, "l": 0.0}


def test_columns_of_all_parts_are_wanted_once_and_constants_are_not(file):
    parts = [
        {"name": "a", "kind": f"{file}:right"},
        {"name": "b", "kind": "number_match"},
        {"name": "c", "kind": "regex", "arguments": {"pattern": "x"}},
        {"name": "d", "kind": f"{file}:look"},
    ]
    assert columns_for_reward(RewardSection(parts=parts), None) == ["answer", "extra"]
    assert columns_for_reward(RewardSection(kind="regex", arguments={"pattern": "x"}), None) == []
    assert columns_for_reward(RewardSection(kind="exact_answer"), lambda response, gold: 0) == [
        "gold"
    ]


def test_a_kind_is_one_part_without_a_name():
    section = RewardSection(kind="regex", arguments={"pattern": "x"})
    assert parts_of(section) == [RewardPart("regex", {"pattern": "x"}, 1.0, None)]
    assert section.label == "regex"
    several = [{"name": "a", "kind": "x", "weight": 2}, {"name": "b", "kind": "y", "weight": -0.5}]
    assert RewardSection(parts=several).label == "2 x a + -0.5 x b"


@table(
    ("part", "reason"),
    [
        (RewardPart("no_rule"), r"reward\.kind 'no_rule' is not a rule"),
        (RewardPart("no_rule", name="n"), r"reward\.parts, n: kind 'no_rule' is not a rule"),
        (
            RewardPart("regex", {"patern": "x"}),
            "regex takes no argument 'patern', only response",
        ),
        (
            RewardPart("regex", {"pattern": "("}, name="n"),
            r"parts, n: .*cannot read its pattern",
        ),
        (RewardPart("regex", {"response": "x"}), r"arguments\.response comes from the row"),
        (RewardPart("format"), "reward: The rule format needs either"),
    ],
)
def test_a_part_that_cannot_work_is_refused_before_training(part, reason):
    with pytest.raises(UserError, match=reason):
        load_part(part)
