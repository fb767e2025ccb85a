import math

import numpy as np
import pytest
import torch
from helpers import f64, table
from hypothesis import given
from hypothesis import strategies as st

from tether.rollout.sampler import Greedy
from tether.rollout.token_choice import choose_tokens, inverse_cdf

weights = st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0]), min_size=1, max_size=8).filter(any)
LARGEST = 1 - 2**-53  # the largest number that uniform() can give


def slow_inverse_cdf(probabilities: list[float], u: float) -> int:
    total = 0.0
    for token, p in enumerate(probabilities):
        total += p
        if total > u:
            return token
    raise AssertionError("u lies beyond the last token")


@given(weights, st.floats(0, LARGEST))
def test_the_token_is_the_first_whose_cumulative_probability_exceeds_u(weights, u):
    probabilities = [w / math.fsum(weights) for w in weights]
    near = min(abs(math.fsum(probabilities[: i + 1]) - u) for i in range(len(weights)))
    if near > 1e-9:
        found = inverse_cdf(f64([probabilities]), f64([u]))
        assert int(found) == slow_inverse_cdf(probabilities, u)


@table(("u", "token"), [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (LARGEST, 4)])
def test_a_token_of_probability_zero_is_never_drawn(u, token):
    """Also at the borders, where u equals a cumulative probability or is all but 1."""
    assert int(inverse_cdf(f64([[0, 0.25, 0, 0.5, 0.25, 0]]), f64([u]))) == token


def test_draws_of_many_u_have_the_frequencies_of_the_distribution():
    probabilities = [0.5, 0.0, 0.3, 0.2]
    u = (torch.arange(1000).double() + 0.5) / 1000
    found = inverse_cdf(f64([probabilities] * 1000), u)
    assert np.bincount(found, minlength=4).tolist() == [500, 0, 300, 200]


def test_a_float32_tail_of_a_large_vocabulary_is_reachable():
    """100,000 tokens of 1e-9 beside one of nearly 1: a float32 sum would lose them all."""
    probabilities = torch.full((1, 100_001), 1e-9)
    probabilities[0, 0] = 1 - 1e-4
    tokens = [int(inverse_cdf(probabilities, f64([u]))) for u in (0.5, 0.99995, LARGEST)]
    assert tokens[0] == 0
    assert tokens[1] == pytest.approx(50_000, abs=100)
    assert tokens[2] == 100_000


def test_greedy_takes_the_likeliest():
    log_probs = f64([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]]).log()
    tokens, chosen = choose_tokens(log_probs + 5, Greedy(), np.arange(2), np.zeros(2))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(chosen.exp(), f64([0.5, 0.6]))


@given(st.lists(st.integers(0, 699), min_size=1, max_size=6, unique=True), st.floats(0, LARGEST))
def test_blocks_of_the_cumulative_sum_change_no_token(possible, u):
    """700 tokens are three blocks; most weigh nothing, also whole blocks and their last cells."""
    possible = sorted(possible)
    weights = torch.zeros(1, 700, dtype=torch.float64)
    weights[0, possible] = 1 / len(possible)
    near = min(abs((i + 1) / len(possible) - u) for i in range(len(possible)))
    found = int(inverse_cdf(weights, f64([u])))
    assert found in possible
    if near > 1e-9:
        assert found == possible[int(u * len(possible))]
