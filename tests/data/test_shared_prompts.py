"""Which rows share a prompt, whether packing pays, and where each token lies when it does."""

import torch
from helpers import sequences_of, table
from hypothesis import given
from hypothesis import strategies as st

from tether.data import shared_prompts
from tether.data.batching import microbatches
from tether.data.shared_prompts import (
    TokenCount,
    count_tokens,
    pack,
    packed_groups,
    prompt_groups,
    saved_tokens,
)
from tether.types import Sequences

# (prompt's number, response's length) of each row; a prompt's number is also its length.
rows_of_prompts = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=12)


def rows_with(pairs: list[tuple[int, int]], share: bool = True) -> Sequences:
    """Rows of prompt `[n] * n` and a response of ids 100 + row."""
    found = sequences_of(
        [([number] * number, [100 + row] * size) for row, (number, size) in enumerate(pairs)]
    )
    lengths = found.prompt_lengths, found.response_lengths
    return Sequences(found.ids, *lengths, share_prompts=share)


def test_rows_are_grouped_by_equal_prompts_wherever_they_are():
    rows = [([1, 2], [3]), ([1], [2, 3]), ([1, 2], [9]), ([1, 2, 3], [4]), ([1], [5])]
    assert prompt_groups(sequences_of(rows)) == [[0, 2], [1, 4], [3]]


@table(
    ("pairs", "packed"),
    [
        ([(32, 16)] * 5, True),  # 128 of 240 tokens
        ([(32, 16)] * 4, False),  # 96 saved: too few
        ([(32, 97)] * 5, False),  # 128 of 645, less than a fifth
        ([(32, 96)] * 5, True),  # 128 of 640, a fifth
        ([(32, 16), (33, 16), (34, 16), (35, 16), (36, 16)], False),  # no two alike
    ],
)
def test_rows_are_packed_where_that_saves_a_fifth_and_128_tokens(pairs, packed):
    assert (packed_groups(rows_with(pairs)) is not None) == packed
    assert packed_groups(rows_with(pairs, share=False)) is None
    assert saved_tokens(rows_with(pairs)) == (128 if packed else 0)


def test_a_packed_prompt_counts_once_and_padding_not_at_all():
    """Prompts of 100 and 100, responses of 10, 20 and 5: 235 packed; 3 rows of 120 are 360."""
    count = count_tokens(rows_with([(100, 10), (100, 20), (99, 5)]), [[0, 1], [2]])
    assert (count.tokens, count.saved, count.cells) == (334, 100, 35)
    assert count.computed == 360  # 100 saved are too few
    more = count.with_row(2, 99, 5)  # the second row of the third prompt here
    assert not more.is_packed
    assert more.saved == 100
    again = TokenCount().with_row(0, 200, 10).with_row(0, 200, 20)
    assert again.computed == 230


@given(rows_of_prompts, st.integers(1, 40))
def test_packed_microbatches_hold_each_row_once_within_the_token_budget(pairs, budget):
    sequences = rows_with(pairs)
    groups = prompt_groups(sequences)
    parts = shared_prompts.packed_microbatches(sequences, groups, budget, None)
    assert sorted(row for part in parts for row in part) == list(range(len(pairs)))
    for part in parts:
        padded = len(part) * max(sum(pairs[row]) for row in part)
        assert padded <= budget or len(part) == 1  # too few tokens to be packed


def test_rows_of_a_prompt_share_a_microbatch_where_they_fit():
    """Three prompts of 64 with 4 responses of 16, 128 tokens each; then one of 8 responses."""
    pairs = [(64, 16), (65, 16), (66, 16)] * 4
    parts = microbatches(rows_with(pairs), max_tokens=260)
    assert [part.tolist() for part in parts] == [[0, 3, 6, 9, 1, 4, 7, 10], [2, 5, 8, 11]]
    parts = microbatches(rows_with([(64, 16)] * 8), max_tokens=150)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    parts = microbatches(rows_with(pairs), max_tokens=1000, max_cells=70)
    assert [len(part) for part in parts] == [4, 4, 4]


def test_rows_that_may_not_share_are_cut_as_ever():
    pairs = [(64, 16), (65, 16)] * 4
    parts = microbatches(rows_with(pairs, share=False), max_tokens=330)
    assert [part.tolist() for part in parts] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@given(rows_of_prompts)
def test_a_line_holds_each_prompt_once_and_each_response_once(pairs):
    sequences = rows_with(pairs)
    groups = prompt_groups(sequences)
    lengths = [number for number, _ in pairs], [size for _, size in pairs]
    layout = pack(groups, *lengths)
    line = sequences.ids[layout.rows, layout.columns].tolist()
    expected, positions = [], []
    for group in groups:
        number = pairs[group[0]][0]
        expected += [number] * number
        positions += range(number)
        for row in group:
            expected += [100 + row] * pairs[row][1]
            positions += range(number, number + pairs[row][1])
    assert line == expected
    assert layout.columns.tolist() == positions


@given(rows_of_prompts)
def test_a_response_sees_its_prompt_and_its_own_past_alone(pairs):
    sequences = rows_with(pairs)
    groups = prompt_groups(sequences)
    layout = pack(groups, [number for number, _ in pairs], [size for _, size in pairs])
    line = sequences.ids[layout.rows, layout.columns]
    width = layout.prompt_width
    prompts = line[layout.cells[: len(groups) * width]].view(len(groups), width)
    for row, (number, size) in enumerate(pairs):
        allowed = layout.allowed.expand(len(pairs), -1, -1, -1)[row, 0]
        seen = torch.cat([prompts[layout.prompt_of_row[row]], line[layout.response_cells[row]]])
        for t in range(size):
            assert seen[allowed[t]].tolist() == [number] * number + [100 + row] * (t + 1)


def test_every_token_has_one_cell():
    layout = pack([[0, 2], [1]], [2, 3, 2], [1, 2, 0])
    assert layout.cells[layout.token_cells].tolist() == list(range(8))
    assert len(set(layout.token_cells.tolist())) == 8
