import torch
from hypothesis import given
from hypothesis import strategies as st

from tether.data.batching import join, length_mask, microbatches, pad_left, pad_right
from tether.types import Rollout, Sequences

ids = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def rollout_of(prompts: list[list[int]], responses: list[list[int]]) -> Rollout:
    """By hand: blanks are 99 here, so that one that slips through is seen."""
    p, r = max(map(len, prompts)), max(map(len, responses))
    lengths = torch.tensor([len(x) for x in responses])
    cells = torch.zeros(len(prompts), r)
    return Rollout(
        prompt_ids=torch.tensor([[99] * (p - len(x)) + x for x in prompts]),
        prompt_lengths=torch.tensor([len(x) for x in prompts]),
        response_ids=torch.tensor([x + [99] * (r - len(x)) for x in responses]),
        response_lengths=lengths,
        response_mask=length_mask(lengths, r),
        rollout_log_probs=cells,
        finish_reasons=("eos",) * len(prompts),
    )


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=6))
def test_join_puts_prompt_and_response_side_by_side_without_a_gap(rows):
    """Trap 4: ids come out as they went in; Trap 1: id 0 inside a row is kept."""
    joined = join(rollout_of([p for p, _ in rows], [r for _, r in rows]))
    width = max(len(p) + len(r) for p, r in rows)
    expected = [p + r + [0] * (width - len(p) - len(r)) for p, r in rows]
    assert joined.ids.tolist() == expected
    for row, (_, response) in enumerate(rows):
        assert joined.response_ids[row, : len(response)].tolist() == response


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 60),
)
def test_microbatches_hold_each_row_once_within_the_token_budget(lengths, budget):
    prompts, responses = (torch.tensor(column) for column in zip(*lengths, strict=True))
    sequences = Sequences(torch.zeros(len(lengths), 18, dtype=torch.long), prompts, responses)
    groups = [group.tolist() for group in microbatches(sequences, budget)]
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * max(sum(lengths[row]) for row in group)
        assert padded <= budget or len(group) == 1


def test_microbatches_hold_no_more_response_tokens_than_they_may():
    """Lengths 4, 5, 6, 6; responses 2, 3, 1, 4: at most 5 together, in the order of lengths."""
    prompts, responses = torch.tensor([2, 5, 2, 2]), torch.tensor([2, 1, 3, 4])
    sequences = Sequences(torch.zeros(4, 6, dtype=torch.long), prompts, responses)
    groups = [group.tolist() for group in microbatches(sequences, 1000, max_cells=5)]
    assert groups == [[0, 2], [1, 3]]
    assert [g.tolist() for g in microbatches(sequences, 1000, max_cells=1)] == [[0], [2], [1], [3]]


def test_selected_rows_are_cut_to_the_longest_of_them():
    sequences = Sequences(
        torch.tensor([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0], [8, 9, 4, 0, 0]]),
        torch.tensor([2, 1, 1]),
        torch.tensor([3, 1, 2]),
    )
    picked = sequences.select(torch.tensor([2, 1]))
    assert picked.ids.tolist() == [[8, 9, 4], [6, 7, 0]]
    assert picked.width == 2
    assert picked.response_ids.tolist() == [[9, 4], [7, 0]]


def test_padding_stands_left_of_prompts_and_right_of_responses():
    assert pad_left([[1], [2, 3]]).tolist() == [[0, 1], [2, 3]]
    assert pad_right([[1.5], [2.0, 3.0]], torch.float64).tolist() == [[1.5, 0], [2, 3]]
    assert pad_right([[True], [True, False]], torch.bool).tolist() == [[True, False], [True, False]]


def test_a_length_mask_is_true_on_the_first_columns():
    assert length_mask(torch.tensor([0, 2]), 3).tolist() == [[False] * 3, [True, True, False]]
