import numpy as np
import torch
from helpers import table
from hypothesis import given
from hypothesis import strategies as st

from tether.algo.random import permutation, uniform

KEY = (3, "token", 5, 7, 11)


def test_equal_keys_give_equal_numbers():
    assert torch.equal(uniform(*KEY), uniform(*KEY))


@table("part", range(5))
def test_a_key_that_differs_in_one_part_gives_another_number(part):
    other = list(KEY)
    other[part] = "other" if part == 1 else KEY[part] + 1
    assert not torch.equal(uniform(*KEY), uniform(*other))


def test_row_and_column_are_not_interchangeable():
    assert not torch.equal(uniform(3, "token", 5, 7, 11), uniform(3, "token", 5, 11, 7))


def test_a_number_does_not_depend_on_which_others_are_computed_with_it():
    together = uniform(3, "token", 5, np.arange(10), np.full(10, 4))
    alone = [float(uniform(3, "token", 5, row, 4)) for row in range(10)]
    assert together.tolist() == alone


@table(
    "words",
    [(np.arange(100_000), 0), (0, np.arange(100_000)), (*np.divmod(np.arange(100_000), 16),)],
)
def test_numbers_are_uniform_over_rows_and_columns(words):
    """Chi-square over 100 bins: 99 degrees of freedom, 0.1% point 148.2."""
    draws = uniform(0, "token", 0, *words).numpy()
    assert draws.dtype == np.float64
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.bincount((draws * 100).astype(int), minlength=100)
    assert ((counts - 1000) ** 2 / 1000).sum() < 148.2


def test_neighbours_are_uncorrelated():
    draws = uniform(0, "token", 0, np.arange(100_000), 0).numpy()
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.01


@given(st.integers(1, 60), st.integers(0, 2**32))
def test_a_permutation_holds_every_number_once(size, seed):
    assert sorted(permutation(size, seed, "actor", 0, 0).tolist()) == list(range(size))


def test_permutations_differ_by_epoch_iteration_seed_and_purpose():
    keys = [(0, "actor", 0, 0), (0, "actor", 0, 1), (0, "actor", 1, 0), (1, "actor", 0, 0)]
    keys.append((0, "critic", 0, 0))
    assert len({tuple(permutation(20, *key).tolist()) for key in keys}) == 5


def test_first_places_of_permutations_are_even():
    """Each of 5 numbers comes first 200 times in 1000, within 5 standard deviations (12.6)."""
    firsts = [int(permutation(5, 0, "actor", 0, epoch)[0]) for epoch in range(1000)]
    assert all(abs(count - 200) < 64 for count in np.bincount(firsts, minlength=5))
