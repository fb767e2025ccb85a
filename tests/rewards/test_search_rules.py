"""The rewards of a policy that searches."""

import pytest
from helpers import table

from tether.rewards.functions import call_reward
from tether.rewards.rules import search_answer, search_format, search_retrieval


@table(
    ("turn", "target", "score"),
    [
        ("<answer>Aru</answer>", "Aru", 1),
        ("I think <answer> the  ARU! </answer>", "aru", 1),  # case, punctuation, article, spaces
        ("<answer>Anaru</answer>", "Aru", 0),  # an article is a word of its own
        ("<answer>1984</answer>", 1984, 1),
        ("<answer>two</answer>", ["one", "two"], 1),
        ("<answer>three</answer>", ["one", "two"], 0),
        ("<answer>Aru</answer>", {"target": ["Aru", "Aruu"]}, 1),  # Search-R1's rows
        ("<answer>石桥镇</answer>", "石桥镇", 1),
        ("<answer>Aru</answer> no, <answer>Bel</answer>", "Aru", 0),  # the last one counts
        ("<answer>Aru</answer> no, <answer>Bel</answer>", "Bel", 1),
        ("Aru", "Aru", 0),
        ("<answer>Aru", "Aru", 0),
        ("<answer></answer>", "A", 0),  # nothing is not the letter A, though A is an article
        ("<answer>a.</answer>", "A", 0),  # its own text then: full stop and all
        ("<answer>a</answer>", "A", 1),
    ],
)
def test_the_last_answer_of_the_policy_is_compared_as_search_r1_does(turn, target, score):
    assert search_answer([turn], target) == score


def test_an_answer_that_stands_only_in_a_document_or_the_prompt_scores_0():
    """Must show 5: Search-R1 found its own example in the prompt."""
    row = {
        "prompt": "Answer like this: <answer>Aru</answer>. Where was Kel born?",
        "response": "<search>Kel</search><information><answer>Aru</answer></information>",
        "policy_turns": ["<search>Kel</search>", "I do not know"],
        "observations": ["<information><answer>Aru</answer></information>"],
        "finished": True,
        "ground_truth": "Aru",
    }
    assert call_reward(search_answer, row) == 0
    assert call_reward(search_answer, {**row, "policy_turns": ["x", "<answer>Aru</answer>"]}) == 1


def test_a_tag_does_not_span_two_turns():
    assert search_answer(["<ans", "wer>Aru</answer>"], "Aru") == 0
    assert search_answer(["<answer>Aru", "</answer>"], "Aru") == 0


def test_ground_truth_without_a_target_is_an_error_that_names_what_is_there():
    with pytest.raises(ValueError, match="no target, only answer"):
        search_answer(["<answer>x</answer>"], {"answer": "x"})


@table(
    ("turns", "score"),
    [
        (["<search>x</search>", "<answer>y</answer>"], 1),
        (["<answer>y</answer>\n"], 1),
        (["<answer>y</answer> and more"], 0),
        (["<answer>x</answer><answer>y</answer>"], 0),
        (["y"], 0),
        (["</answer><answer>"], 0),
    ],
)
def test_the_format_is_one_answer_at_the_end(turns, score):
    assert search_format(turns) == score


@table(
    ("told", "target", "score"),
    [
        (["<information>Kel\nborn in Aru.</information>"], ["Bel", "Aru"], 1),
        (["<information>born in Anaru</information>"], "Aru", 0),  # whole words
        (["one", "他生于石桥镇。"], "石桥镇", 1),
        ([], "Aru", 0),
        (["anything"], "?!", 0),
    ],
)
def test_the_retrieval_part_asks_whether_a_target_was_read(told, target, score):
    assert search_retrieval(told, target) == score
