import math
import statistics

import pytest
import torch
from helpers import f64, grids, numbers, table
from hypothesis import assume, given
from hypothesis import strategies as st

from tether.algo.masked import (
    cell_weights,
    explained_variance,
    masked_mean,
    masked_moments,
    masked_sum,
    weighted_sum,
    whiten,
)


def kept(cells, mask) -> list[float]:
    return [cells[i][t] for i, flags in enumerate(mask) for t, flag in enumerate(flags) if flag]


@given(grids(numbers, st.booleans()))
def test_moments_are_those_of_the_true_cells(cells):
    x, mask = cells
    left = kept(x, mask)
    found = masked_moments(f64(x), torch.tensor(mask))
    assert int(found.count) == len(left)
    assert float(found.mean) == pytest.approx(statistics.fmean(left) if left else 0, abs=1e-9)
    if len(left) > 1:
        assert float(found.variance) == pytest.approx(statistics.variance(left), abs=1e-9)


@given(grids(numbers, st.booleans()))
def test_whitened_cells_have_mean_zero_and_unbiased_variance_one(cells):
    x, mask = cells
    assume(len(kept(x, mask)) > 1 and statistics.variance(kept(x, mask)) > 1e-3)
    flags = torch.tensor(mask)
    white = whiten(f64(x), flags, masked_moments(f64(x), flags)).tolist()
    assert statistics.fmean(kept(white, mask)) == pytest.approx(0, abs=1e-6)
    assert statistics.variance(kept(white, mask)) == pytest.approx(1, abs=1e-4)
    assert not any(kept(white, [[not flag for flag in row] for row in mask]))


def test_whitening_by_hand():
    """2, 4, 9 have mean 5 and unbiased variance 13."""
    x, mask = f64([[2.0, 4.0, 100.0, 9.0]]), torch.tensor([[True, True, False, True]])
    found = whiten(x, mask, masked_moments(x, mask))[0].tolist()
    root = math.sqrt(13 + 1e-8)
    assert found == pytest.approx([-3 / root, -1 / root, 0, 4 / root])


@table(("mask", "expected"), [([True, False], [0, 0]), ([False, False], [0, 0])])
def test_fewer_than_two_cells_are_centred_only(mask, expected):
    x, flags = f64([7.0, 3.0]), torch.tensor(mask)
    moments = masked_moments(x, flags)
    assert float(moments.variance) == 1.0
    assert whiten(x, flags, moments).tolist() == expected


def test_equal_cells_whiten_to_zero_and_not_to_nan():
    x, mask = f64([4.0, 4.0, 4.0]), torch.ones(3, dtype=torch.bool)
    assert whiten(x, mask, masked_moments(x, mask)).tolist() == [0, 0, 0]


def test_sums_and_means_leave_masked_nans_out():
    x, mask = f64([1.0, math.nan, 3.0]), torch.tensor([True, False, True])
    assert float(masked_sum(x, mask)) == 4.0
    assert float(masked_mean(x, mask)) == 2.0
    assert float(masked_mean(x, torch.zeros(3, dtype=torch.bool))) == 0.0


@table(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0, 6.0], 1.0),  # foresaw all
        ([5.0, 5.0, 5.0, 5.0], 0.0),  # a constant
        ([1.0, 2.0, 3.0, 3.0], 1 - 9 / 4 / (14 / 3)),  # errors 0, 0, 0, 3: variance 9/4
        ([-1.0, -2.0, -3.0, -6.0], -3.0),  # errors 2, 4, 6, 12: four times the variance
    ],
)
def test_explained_variance_by_hand(values, expected):
    """Returns 1, 2, 3, 6 have unbiased variance 14/3; the masked cell counts for nothing."""
    mask = torch.tensor([True, True, True, True, False])
    found = explained_variance(f64([*values, 50]), f64([1, 2, 3, 6, -50]), mask)
    assert float(found) == pytest.approx(expected)


def test_explained_variance_is_zero_where_returns_do_not_vary():
    x = f64([2.0, 2.0])
    assert float(explained_variance(x - 1, x, torch.ones(2, dtype=torch.bool))) == 0.0
    assert float(explained_variance(x - 1, x, torch.tensor([True, False]))) == 0.0


@given(grids(numbers, st.booleans()), st.integers(1, 4))
def test_microbatches_share_the_count_of_the_whole_minibatch(cells, size):
    """Trap 12: shares add up to the mean over all tokens, however rows are split."""
    x, mask = cells
    left = kept(x, mask)
    weights = cell_weights("token_mean", torch.tensor(mask), 99, torch.float64)
    shares = [
        float(weighted_sum(f64(x[i : i + size]), weights[i : i + size]))
        for i in range(0, len(x), size)
    ]
    assert sum(shares) == pytest.approx(statistics.fmean(left) if left else 0, abs=1e-9)
