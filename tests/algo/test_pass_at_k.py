"""pass@k and maj@k by hand, and against every set of k of the responses."""

import itertools
import math
from fractions import Fraction

import pytest
from helpers import table
from hypothesis import given
from hypothesis import strategies as st

from tether.algo.pass_at_k import best_of_k, majority_of_k


@table(
    ("right", "n", "k", "expected"),
    [
        (1, 4, 1, 1 / 4),
        (1, 4, 2, 1 / 2),  # 1 - C(3, 2) / C(4, 2) = 1 - 3/6
        (2, 5, 2, 7 / 10),  # 1 - 3/10; the plug-in 1 - 0.6² would be 0.64
        (3, 10, 5, 11 / 12),  # 1 - 21/252
        (0, 8, 8, 0.0),
        (6, 8, 3, 1.0),  # three of two wrong ones cannot be drawn
    ],
)
def test_pass_at_k_by_hand(right, n, k, expected):
    assert best_of_k([1.0] * right + [0.0] * (n - right), k) == pytest.approx(expected)


def test_best_of_two_of_three_scores_by_hand():
    """Pairs of 0.1, 0.5, 0.9: the best are 0.5, 0.9, 0.9."""
    assert best_of_k([0.9, 0.1, 0.5], 2) == pytest.approx(2.3 / 3)


@table(
    ("answers", "scores", "k", "expected"),
    [
        # Triples of a a b c: aab a, aac a, abc a tie of three, twice.
        ("aabc", [1, 1, 0, 0], 3, (1 + 1 + 1 / 3 + 1 / 3) / 4),
        ("aabc", [1, 1, 0, 0], 4, 1.0),
        ("aabb", [1, 1, 0, 0], 4, 0.5),  # a tie counts half
        ("aab", [0, 0, 1], 3, 0.0),  # most agree on a wrong answer
        ("a.b", [1, 0, 0], 2, 0.5),  # pairs: a alone votes; a and b tie; b alone votes
        ("...", [0, 0, 0], 2, 0.0),  # nobody votes
        ("aaa", [1, 0, 1], 3, 2 / 3),  # one answer, whose responses are not all scored alike
    ],
)
def test_a_majority_by_hand(answers, scores, k, expected):
    said = [None if answer == "." else answer for answer in answers]
    assert majority_of_k([float(x) for x in scores], said, k) == pytest.approx(expected)


def slow_majority(scores, answers, k):
    """Vote in every set of k, one after the other."""
    score = {a: Fraction(sum(s for s, b in zip(scores, answers, strict=True) if a == b),
                         answers.count(a)) for a in set(answers)}  # fmt: skip
    total, sets = Fraction(0), list(itertools.combinations(range(len(scores)), k))
    for rows in sets:
        votes = [answers[row] for row in rows if answers[row] is not None] or [None]
        most = max(votes.count(a) for a in votes)
        tied = {a for a in votes if votes.count(a) == most}
        total += sum(score[a] for a in tied) / len(tied)
    return float(total / len(sets))


responses = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([None, "a", "b", "c", "d"])),
    min_size=1,
    max_size=8,
)


@given(responses, st.data())
def test_the_majority_is_the_mean_over_all_sets_of_k(rows, data):
    k = data.draw(st.integers(1, len(rows)))
    scores, answers = [score for score, _ in rows], [answer for _, answer in rows]
    found = majority_of_k([float(score) for score in scores], answers, k)
    assert found == pytest.approx(slow_majority(scores, answers, k))


@given(responses, st.data())
def test_the_best_is_the_mean_over_all_sets_of_k(rows, data):
    k = data.draw(st.integers(1, len(rows)))
    scores = [float(score) for score, _ in rows]
    sets = list(itertools.combinations(scores, k))
    assert best_of_k(scores, k) == pytest.approx(sum(map(max, sets)) / len(sets))


def test_pass_at_k_is_unbiased():
    """Over all outcomes of six draws that pass with probability 0.3, its mean is 1 - 0.7³."""
    p, n, k = 0.3, 6, 3
    mean = math.fsum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * best_of_k([1.0] * c + [0.0] * (n - c), k)
        for c in range(n + 1)
    )
    assert mean == pytest.approx(1 - (1 - p) ** k)


def test_a_thousand_samples_have_a_finite_majority():
    """a leads b by 12.8 votes of 64 on average, standard deviation 6.75: the normal's 1.9."""
    answers = ["a"] * 500 + ["b"] * 300 + [str(i) for i in range(200)]
    scores = [1.0] * 500 + [0.0] * 500
    assert majority_of_k(scores, answers, 64) == pytest.approx(0.971, abs=0.005)


@table("k", [0, 4])
def test_a_k_that_there_are_not_enough_responses_for_is_refused(k):
    with pytest.raises(ValueError, match="of 3 scores"):
        best_of_k([0.0, 1.0, 1.0], k)
    with pytest.raises(ValueError, match="of 3 scores"):
        majority_of_k([0.0, 1.0, 1.0], ["a", "b", "b"], k)
