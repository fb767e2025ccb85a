"""Orders whose places are computed one by one."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tether.algo.random import permutation, permuted


@given(size=st.integers(1, 700), seed=st.integers(0, 2**64 - 1), data_pass=st.integers(0, 9))
def test_every_number_stands_at_one_place(size, seed, data_pass):
    found = permuted(np.arange(size), size, seed, "shuffle", data_pass)
    assert sorted(found.tolist()) == list(range(size))


def test_a_place_is_the_same_alone_and_among_others():
    size = 1_000_003
    places = np.array([0, 17, 999_999, size - 1, 17])
    found = permuted(places, size, 3, "shuffle", 1)
    alone = [int(permuted(np.array([place]), size, 3, "shuffle", 1)[0]) for place in places]
    assert found.tolist() == alone
    assert all(0 <= number < size for number in alone)


def test_the_key_chooses_the_order():
    size, places = 1000, np.arange(1000)
    orders = {
        tuple(permuted(places, size, *key).tolist())
        for key in [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1)]
    }
    assert len(orders) == 4
    assert tuple(permutation(size, 0, "a", 0).tolist()) not in orders


def test_orders_of_few_are_about_equally_likely():
    """6 numbers over 6,000 keys: each stands at each place 1,000 times, give or take 5 sigma of
    28.9; each of the 720 orders is met 8.3 times, and a quarter of them never missing."""
    size, keys = 6, 6000
    orders = [tuple(permuted(np.arange(size), size, seed, "x").tolist()) for seed in range(keys)]
    counts = Counter((place, number) for order in orders for place, number in enumerate(order))
    assert all(abs(counts[i, j] - 1000) < 145 for i in range(size) for j in range(size))
    assert len(set(orders)) > 700


def test_neighbours_do_not_stay_neighbours():
    """Of 2 million, how far apart two neighbours land has mean size / 3."""
    size = 2_000_000
    found = permuted(np.arange(5000), size, 0, "shuffle", 0).astype(float)
    assert abs(np.abs(np.diff(found)).mean() / size - 1 / 3) < 0.02
    assert abs(found.mean() / size - 0.5) < 0.02
