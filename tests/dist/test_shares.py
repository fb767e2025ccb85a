"""Who does what: every row once, and about the same for all."""

from dataclasses import replace

import pytest
import torch
from helpers import sequences_of
from hypothesis import given
from hypothesis import strategies as st

from tether.data.batching import balance, concat_rollouts, own_microbatches
from tether.dist import world as worlds
from tether.dist.rows import of_rows, spread
from tether.dist.world import World
from tether.types import Call, Rollout


class Replica(World):
    """One of several replicas, without a process group."""

    @property
    def replicas(self) -> int:
        return self.size

    @property
    def replica(self) -> int:
        return self.rank


@pytest.fixture
def as_replica(monkeypatch):
    def become(rank: int, size: int) -> None:
        monkeypatch.setattr(worlds, "_now", Replica(rank, size))

    return become


def test_the_dearest_piece_goes_to_who_has_least():
    # 9 | 7 | 7, then 5 to the first 7, 4 to the other 7, and 3 to the 9, which has least by then.
    assert balance([3, 9, 4, 7, 7, 5], 3) == [[0, 1], [3, 5], [2, 4]]
    assert balance([1, 1, 1], 1) == [[0, 1, 2]]
    assert balance([2], 3) == [[0], [], []]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 5))
def test_shares_hold_every_piece_once_and_differ_by_one_piece_at_most(costs, shares):
    found = balance(costs, shares)
    assert sorted(piece for share in found for piece in share) == list(range(len(costs)))
    loads = [sum(costs[piece] for piece in share) for share in found]
    assert max(loads) - min(loads) <= max(costs)


def test_blocks_are_neighbours_and_cover_the_rows(as_replica):
    found = []
    for rank in range(3):
        as_replica(rank, 3)
        found.append(of_rows(spread(7), range(7)))
    assert found == [[0, 1], [2, 3], [4, 5, 6]]


def test_every_process_has_as_many_microbatches_and_each_row_counts_once(as_replica):
    sequences = sequences_of([([1] * p, [2] * r) for p, r in [(2, 9), (1, 1), (3, 3), (2, 2)]])
    counts, counted = [], []
    for rank in range(3):
        as_replica(rank, 3)
        parts = own_microbatches(sequences, max_tokens=6)
        counts.append(len(parts))
        counted += [row for part in parts if not part.idle for row in part.rows.tolist()]
        assert all(part.rows.tolist() == [1] for part in parts if part.idle)  # the shortest
    assert len(set(counts)) == 1
    assert sorted(counted) == [0, 1, 2, 3]


def test_rows_of_a_prompt_go_to_one_process_where_prompts_are_shared(as_replica):
    """Prompts of 60 and 50 tokens with four rows each: 60 + 4 x 5 here, 50 + 4 x 5 there."""
    rows = [([n] * n, [1] * 5) for n in (60, 50, 60, 50, 60, 50, 60, 50)]
    sequences = replace(sequences_of(rows), share_prompts=True)
    found = []
    for rank in range(2):
        as_replica(rank, 2)
        found.append([part.rows.tolist() for part in own_microbatches(sequences, max_tokens=100)])
    assert found == [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]
    for rank in range(8):  # of eight, each is done sooner with a row of its own
        as_replica(rank, 8)
        (part,) = own_microbatches(sequences, max_tokens=500)
        assert (len(part.rows), part.idle) == (1, False)


def rollout(prompts: list[list[int]], responses: list[list[int]], calls=()) -> Rollout:
    p, r = max(map(len, prompts)), max(map(len, responses))
    right = [row + [0] * (r - len(row)) for row in responses]
    return Rollout(
        prompt_ids=torch.tensor([[0] * (p - len(row)) + row for row in prompts]),
        prompt_lengths=torch.tensor([len(row) for row in prompts]),
        response_ids=torch.tensor(right),
        response_lengths=torch.tensor([len(row) for row in responses]),
        response_mask=torch.tensor([[bool(x) for x in row] for row in right]),
        rollout_log_probs=-torch.tensor(right).float(),
        finish_reasons=("eos",) * len(prompts),
        calls=calls,
    )


def test_rollouts_are_stacked_in_row_order_whatever_their_widths():
    call = Call(0, "search", "x", "y", 0.1)
    narrow, wide = rollout([[1], [2, 3]], [[4], [5, 6]]), rollout([[7, 8, 9]], [[1, 2, 3]])
    found = concat_rollouts([narrow, wide])
    expected = rollout([[1], [2, 3], [7, 8, 9]], [[4], [5, 6], [1, 2, 3]])
    for name, value in vars(expected).items():
        same = getattr(found, name)
        assert torch.equal(same, value) if torch.is_tensor(value) else same == value
    with_calls = concat_rollouts([narrow, rollout([[7]], [[1]], calls=((call,),))])
    assert with_calls.calls == ((), (), (call,))
