import pytest
import torch
from helpers import f64, grids, numbers, table
from hypothesis import given
from hypothesis import strategies as st

from tether.algo.advantages import overlong_penalty, place_scores, shape_rewards


def test_rewards_of_the_six_token_example():
    kl = f64([[0.03, 0.02, 0.03, 0.02, 0.03, 0.01]])
    scores = place_scores(f64([1.0]), torch.ones(1, 6, dtype=torch.bool))
    assert scores.tolist() == [[0, 0, 0, 0, 0, 1]]
    expected = [-0.0003, -0.0002, -0.0003, -0.0002, -0.0003, 0.9999]
    assert shape_rewards(scores, kl, 0.01)[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_a_token_drawn_at_twice_the_references_probability_pays_its_kl():
    """WORKED_EXAMPLES.md, Clip: k1 = log 2, beta 0.1, reward 0.930685."""
    rewards = shape_rewards(f64([[1.0]]), f64([[0.6 / 0.3]]).log(), 0.1)
    assert float(rewards) == pytest.approx(0.930685, abs=1e-6)


@given(grids(numbers, st.booleans()), st.floats(0, 1))
def test_token_rewards_sum_to_the_score_minus_beta_times_the_kl(cells, beta):
    """Trap 8."""
    kl, mask = cells
    kl = torch.where(torch.tensor(mask), f64(kl), 0.0).tolist()
    scores = [row + 0.5 for row in range(len(kl))]
    placed = place_scores(f64(scores), torch.tensor(mask))
    sums = shape_rewards(placed, f64(kl), beta).sum(dim=1).tolist()
    for row, total in enumerate(sums):
        score = scores[row] if any(mask[row]) else 0.0
        assert total == pytest.approx(score - beta * sum(kl[row]), abs=1e-9)


@given(grids(st.booleans()))
def test_a_score_lands_once_on_the_last_true_cell_and_never_on_a_masked_one(cells):
    """Trap 9: also where tool output or padding stands in the last column."""
    [mask] = cells
    placed = place_scores(f64([3.0] * len(mask)), torch.tensor(mask)).tolist()
    for flags, found in zip(mask, placed, strict=True):
        expected = [0.0] * len(flags)
        for t in reversed(range(len(flags))):
            if flags[t]:
                expected[t] = 3.0
                break
        assert found == expected


@table(
    ("length", "expected"), [(0, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (99, -1.0)]
)
def test_the_overlong_penalty_by_hand(length, expected):
    """At most 16 tokens with a buffer of 4: a quarter per token from the 13th on."""
    assert overlong_penalty(torch.tensor([length]), 16, 4, torch.float64).tolist() == [expected]


@given(st.lists(st.integers(0, 60), min_size=2, max_size=6), st.integers(2, 40), st.data())
def test_the_overlong_penalty_falls_with_length_and_never_below_minus_one(lengths, most, data):
    buffer = data.draw(st.integers(1, most - 1))
    found = overlong_penalty(torch.tensor(sorted(lengths)), most, buffer, torch.float64)
    assert (found.diff() <= 0).all()
    assert ((found <= 0) & (found >= -1)).all()
    free = torch.tensor(sorted(lengths)) <= most - buffer
    assert torch.equal(found == 0, free)
