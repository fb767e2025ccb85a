"""Estimators without a critic, against numbers worked out by hand."""

import pytest
import torch
from helpers import f64, table
from hypothesis import given
from hypothesis import strategies as st

from tether.algo import advantages
from tether.algo.advantages import (
    AdvantageInputs,
    WeightedReward,
    estimate_advantages,
    gdpo,
    remax,
    reward_to_go,
    rloo,
    zero_spread,
)
from tether.config import ESTIMATORS, AdvantageSection

# Two prompts with three responses each, of 2, 1 and 3 tokens; the reward stands on the last one.
LENGTHS = [2, 1, 3, 2, 1, 3]
SCORES = torch.tensor([1.0, 0.0, 2.0, 5.0, 5.0, 5.0]).double()
MASK = torch.arange(3) < torch.tensor(LENGTHS)[:, None]
REWARDS = torch.zeros(6, 3).double()
REWARDS[torch.arange(6), torch.tensor(LENGTHS) - 1] = SCORES


def rows(estimator, rewards=REWARDS, scores=SCORES, mask=MASK):
    """The advantage of each row, which must stand on all its tokens and nowhere else."""
    nothing, no_rows = torch.zeros_like(rewards), torch.zeros_like(scores)
    one_part = [WeightedReward(1.0, scores)]
    inputs = AdvantageInputs(rewards, nothing, no_rows, scores, no_rows, mask, 3, one_part)
    found = estimate_advantages(AdvantageSection(estimator=estimator), inputs)
    first = found[:, 0]
    assert torch.equal(found, torch.where(mask, first[:, None], 0.0))
    return first.tolist()


@table(
    ("estimator", "expected"),
    [
        ("dr_grpo", [0.0, -1.0, 1.0]),
        ("reinforce_plus_plus_baseline", [0.0, -1.0, 1.0]),
        ("grpo", [0.0, -1 / 1.000001, 1 / 1.000001]),  # unbiased std of 1, 0, 2 is 1
        ("rloo", [0.0, -1.5, 1.5]),  # 1 - (0+2)/2, 0 - (1+2)/2, 2 - (1+0)/2
        ("opo", [1 - 8 / 6, -8 / 6, 2 - 8 / 6]),  # (2*1 + 1*0 + 3*2) / 6 = 8/6
    ],
)
def test_a_response_is_compared_with_its_group(estimator, expected):
    assert rows(estimator)[:3] == pytest.approx(expected, abs=1e-12)


# The second group pays KL of 0.1, 0.4 and 0.1 and so has s = 4.9, 4.6, 4.9 with mean 4.8.
PAID = REWARDS.clone()
PAID[3:, 0] -= torch.tensor([0.1, 0.4, 0.1], dtype=torch.float64)


@table(
    ("estimator", "expected"),
    [
        ("dr_grpo", [0.1, -0.2, 0.1]),
        ("reinforce_plus_plus_baseline", [0.1, -0.2, 0.1]),
        ("rloo", [0.15, -0.3, 0.15]),  # 4.9 - (4.6 + 4.9)/2, 4.6 - 4.9, 4.9 - (4.9 + 4.6)/2
        ("opo", [0.05, -0.25, 0.05]),  # (2*4.9 + 1*4.6 + 3*4.9) / 6 = 4.85
    ],
)
def test_a_group_whose_scores_are_equal_is_still_pulled_back_by_its_kl(estimator, expected):
    assert rows(estimator, rewards=PAID)[3:] == pytest.approx(expected, abs=1e-12)


def test_grpo_gives_0_to_a_group_whose_scores_are_equal_as_it_would_scale_the_kl_up():
    assert rows("grpo", rewards=PAID)[3:] == [0.0, 0.0, 0.0]


@table("estimator", [name for name, traits in ESTIMATORS.items() if traits.by_group])
def test_a_group_whose_rewards_are_equal_gets_exactly_0(estimator):
    """0.1 + 0.1 + 0.1 is not 0.3: what rounding leaves would be whitened up."""
    scores = torch.full((6,), 0.1)
    rewards = torch.zeros(6, 3)
    rewards[torch.arange(6), torch.tensor(LENGTHS) - 1] = scores
    assert rows(estimator, rewards, scores) == [0.0] * 6


def test_a_group_without_a_usable_row_has_no_spread_to_be_without():
    mask = MASK.clone()
    mask[3:] = False
    assert zero_spread(SCORES, MASK, 3).tolist() == [False, True]
    assert zero_spread(SCORES, mask, 3).tolist() == [False, False]


def test_kl_in_the_reward_counts_in_the_group_baseline():
    shaped = REWARDS.clone()
    shaped[2, 0] = -0.5  # the third response paid 0.5 of KL: s = 1.0, 0.0, 1.5
    mean = 2.5 / 3
    assert rows("dr_grpo", rewards=shaped)[:3] == pytest.approx([1 - mean, -mean, 1.5 - mean])


def test_an_unscorable_row_leaves_its_group():
    mask = MASK.clone()
    mask[2] = False
    rewards = torch.where(mask, REWARDS, 0.0)
    scores = torch.where(mask.any(1), SCORES, 0.0)
    assert rows("rloo", rewards, scores, mask)[:3] == [1.0, -1.0, 0.0]


def test_reward_to_go_discounts_and_carries_over_masked_columns():
    rewards = torch.tensor([[1.0, 0.0, 4.0, 8.0]]).double()
    mask = torch.tensor([[True, False, True, True]])
    # from the end: 8; 4 + .5*8 = 8; (masked); 1 + .5*8 = 5
    assert reward_to_go(rewards, mask, 0.5).tolist() == [[5.0, 0.0, 8.0, 8.0]]


def test_remax_takes_the_greedy_score_off_every_token():
    advantages = remax(REWARDS[:1], torch.tensor([0.25]).double(), MASK[:1], gamma=1.0)
    assert advantages.tolist() == [[0.75, 0.75, 0.0]]


def test_padding_does_not_change_the_last_bit():
    """A longer row elsewhere in the batch widens this one; its float32 numbers stay the same."""
    torch.manual_seed(0)
    rewards = torch.randn(6, 7)
    mask = torch.ones(6, 7, dtype=torch.bool)
    narrow = rloo(rewards, mask, samples=3)
    for extra in range(1, 60):
        wide = torch.nn.functional.pad(rewards, (0, extra))
        padded = torch.nn.functional.pad(mask, (0, extra))
        assert torch.equal(rloo(wide, padded, samples=3)[:, :7], narrow)


def test_every_estimator_of_the_config_has_a_function_and_no_other_name_has():
    assert list(advantages.ESTIMATORS) == list(ESTIMATORS)


def parts_of(*pairs) -> list[WeightedReward]:
    return [WeightedReward(weight, f64(values)) for weight, values in pairs]


def test_gdpo_by_hand():
    """Two prompts of two rows. Rewards 0, 1, 0, 1 of weight 1 are -+1/sqrt 2 in both groups, and
    10, 30, 5, 5 of weight 2 are -+2/sqrt 2 in the first and 0 in the second. Their sums are -+3 and
    -+1 in units of 1/sqrt 2, whose standard deviation over four rows is sqrt(20/3)."""
    parts = parts_of((1.0, [0.0, 1, 0, 1]), (2.0, [10.0, 30, 5, 5]))
    mask = torch.ones(4, 2, dtype=torch.bool)
    found = gdpo(parts, mask, samples=2)
    scale = (20 / 3) ** 0.5
    expected = [-3 / scale, 3 / scale, -1 / scale, 1 / scale]
    assert found[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(found[:, 0], found[:, 1])


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=6, max_size=6),
    st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=6, max_size=6),
    st.floats(0.1, 5),
    st.floats(0.5, 20),
    st.floats(-10, 10),
)
def test_gdpo_does_not_see_a_rewards_own_scale_and_shift(one, other, weight, scale, shift):
    """The reason for it: a reward in cents or in dollars weighs the same."""
    mask = torch.ones(6, 1, dtype=torch.bool)
    found = gdpo(parts_of((1.0, one), (weight, other)), mask, samples=3)
    moved = [scale * x + shift for x in other]
    again = gdpo(parts_of((1.0, one), (weight, moved)), mask, samples=3)
    torch.testing.assert_close(found, again, rtol=1e-4, atol=1e-4)
    assert float(found.sum()) == pytest.approx(0, abs=1e-5)


def test_gdpo_leaves_rows_without_a_token_out_and_is_0_where_nothing_differs():
    mask = torch.tensor([[True], [True], [False], [True], [True], [True]])
    parts = parts_of((1.0, [0.0, 1, 99, 2, 2, 2]), (1.0, [1.0, 1, -99, 3, 3, 3]))
    found = gdpo(parts, mask, samples=3)[:, 0].tolist()
    assert found[2:] == [0, 0, 0, 0]
    assert found[0] == pytest.approx(-found[1])
    assert found[1] > 0
