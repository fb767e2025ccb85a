"""Several files by weight: the counts are worked out by hand."""

from collections import Counter
from fractions import Fraction

from helpers import table
from hypothesis import given
from hypothesis import strategies as st

from tether.data.prompts import PromptSet, as_fraction, file_at, first_rows
from tether.types import Prompts


def order(length: int, *weights: float) -> str:
    exacts = [as_fraction(weight) for weight in weights]
    return "".join("ABCD"[file_at(n, exacts)[0]] for n in range(length))


@table(
    ("weights", "turns"),
    [
        ((1.0,), "AAAAAAAA"),
        ((1.0, 1.0), "ABABABAB"),
        ((3.0, 1.0), "AAABAAAB"),
        ((1.0, 3.0), "ABBBABBB"),
        ((2.0, 1.0, 1.0), "ABACABAC"),
        ((0.3, 0.1), "AAABAAAB"),  # only what they are to each other matters
        ((0.1, 0.2, 0.1), "ABBCABBC"),
    ],
)
def test_turns_are_dealt_evenly_by_weight(weights, turns):
    assert order(8, *weights) == turns


def test_a_weight_means_what_was_written_not_the_nearest_binary_fraction():
    assert as_fraction(0.1) == Fraction(1, 10)
    assert as_fraction(1e-05) == Fraction(1, 100_000)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 5))
def test_counts_are_exact_after_every_round_and_no_turn_is_lost(weights, rounds):
    """A file's turns are numbered 0, 1, 2, …: its own stream has neither gap nor repetition."""
    exacts = [Fraction(weight) for weight in weights]
    turns = [file_at(n, exacts) for n in range(rounds * sum(weights))]
    for file, weight in enumerate(weights):
        assert [number for f, number in turns if f == file] == list(range(rounds * weight))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=4), st.integers(0, 10**12))
def test_a_late_position_needs_no_earlier_one(weights, position):
    """Within one prompt a file of the share, wherever one looks."""
    exacts = [as_fraction(weight) for weight in weights]
    file, before = file_at(position, exacts)
    share = exacts[file] / sum(exacts)
    assert abs(before - position * share) <= len(weights)


def test_the_first_rows_follow_the_weights_until_a_file_runs_out():
    """Row j of a file of weight w is due at j/w: A at 0, 1/2, 1, 3/2, …, B at 0, 1."""
    found = first_rows(8, [9, 2], [Fraction(2), Fraction(1)])
    assert "".join("AB"[file] for file, _ in found) == "ABAABAAA"
    assert found == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3), (0, 4), (0, 5)]
    assert len(first_rows(99, [9, 2], [Fraction(2), Fraction(1)])) == 11


def mixed(sizes: list[int], weights: list[float]) -> PromptSet:
    texts = [f"{'AB'[file]}{row}" for file, size in enumerate(sizes) for row in range(size)]
    count = len(texts)
    prompts = Prompts(
        texts, [[0]] * count, [{}] * count, [0] * count, ["f"] * count, [None] * count
    )
    return PromptSet(prompts, sizes, weights)


def test_each_file_goes_through_its_own_data_passes():
    """Weights 3 and 1, files of 6 and 4 rows: 16 prompts are 12 of A (two passes), 4 of B (one)."""
    data = mixed([6, 4], [3.0, 1.0])
    stream = [
        text for i in range(4) for text in data.for_iteration(i, 4, seed=5, shuffle=True).texts
    ]
    assert [text[0] for text in stream] == list("AAAB" * 4)
    counts = Counter(stream)
    assert {text: counts[text] for text in data.prompts.texts} == {
        **{f"A{i}": 2 for i in range(6)},
        **{f"B{i}": 1 for i in range(4)},
    }
    assert sorted(text for text in stream if text[0] == "A")[:2] == ["A0", "A0"]
    assert len({text for text in stream[:8] if text[0] == "A"}) == 6  # a pass before a repetition


def test_without_shuffling_each_file_is_in_file_order():
    data = mixed([3, 2], [1.0, 1.0])
    assert data.for_iteration(0, 8, 0, False).texts == [
        "A0",
        "B0",
        "A1",
        "B1",
        "A2",
        "B0",
        "A0",
        "B1",
    ]


def test_two_files_are_shuffled_each_in_its_own_order():
    data = mixed([50, 50], [1.0, 1.0])
    taken = data.for_iteration(0, 100, 0, True).texts
    a, b = ([int(text[1:]) for text in taken if text[0] == letter] for letter in "AB")
    assert sorted(a) == sorted(b) == list(range(50))
    assert a != b


def test_a_list_of_one_file_is_that_file():
    alone, listed = mixed([9], [1.0]), mixed([9], [0.2])
    assert alone.for_iteration(3, 4, 1, True) == listed.for_iteration(3, 4, 1, True)
