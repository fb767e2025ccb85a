"""Exact and sampled KL of typed distributions."""

import math

import pytest
from helpers import table

from tether.errors import UserError
from tether.explain.kl_table import parse_pair, sample_estimates, tell_exact, tell_samples

P, Q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]  # KL is 0.25 ln 2 both ways: 0.25 bits


def lines(section) -> str:
    return "\n".join(
        block if isinstance(block, str) else "\n".join(" ".join(row) for row in block.rows)
        for block in section.blocks
    )


def test_both_directions_in_nats_and_bits_with_the_terms_of_the_sum():
    text = lines(tell_exact(P, Q))
    assert "KL(P‖Q) = 0.173287 nats = 0.250000 bits" in text
    assert "KL(Q‖P) = 0.173287 nats = 0.250000 bits" in text
    assert "1 0.500000 0.250000 0.346574 -0.173287" in text
    assert "3 0.250000 0.500000 -0.173287 0.346574" in text


def test_an_impossible_outcome_makes_it_infinite_and_is_named():
    text = lines(tell_exact([0.5, 0.5], [1.0, 0.0]))
    assert "KL(P‖Q) = ∞ nats" in text
    assert "KL(Q‖P) = 0.693147 nats = 1.000000 bits" in text
    assert "KL(P‖Q) is infinite: outcome 2 has probability 0.5 under P and 0 under Q." in text
    assert "nothing to converge to" in lines(tell_samples([0.5, 0.5], [1.0, 0.0], 100, 0))


def test_estimates_converge_to_the_exact_value_and_k2_to_its_own():
    exact = 0.25 * math.log(2)
    k2_limit = 0.75 * math.log(2) ** 2 / 2  # where p and q differ, (log 2)^2 / 2
    last = {e.estimator: e for e in sample_estimates(P, Q, 40_000, seed=0)[-3:]}
    for name, limit in (("k1", exact), ("k2", k2_limit), ("k3", exact)):
        assert abs(last[name].mean - limit) < 4 * last[name].error
        assert last[name].bias == pytest.approx(last[name].mean - exact)
        assert last[name].error == pytest.approx(last[name].spread / 200)
    assert abs(last["k2"].bias) > 8 * last["k2"].error
    # k1 is ±ln 2 or 0 with chances 1/2, 1/4, 1/4.
    variance = 0.75 * math.log(2) ** 2 - exact**2
    assert last["k1"].spread == pytest.approx(math.sqrt(variance), rel=0.02)


def test_growing_counts_are_the_first_of_one_sequence_and_the_seed_decides():
    short, long = sample_estimates(P, Q, 100, 0), sample_estimates(P, Q, 1000, 0)
    assert [e.samples for e in long[::3]] == [10, 100, 1000]
    assert short == long[:6]
    assert sample_estimates(P, Q, 100, 1) != short
    assert math.isnan(sample_estimates(P, Q, 1, 0)[0].spread)


def test_fractions_are_probabilities_too():
    p, q = parse_pair("1/6,1/6, 1/6,1/6,1/6,1/6", "0.1,0.1,0.1,0.1,0.1,0.5")
    assert p == [1 / 6] * 6
    assert q[-1] == 0.5


@table(
    ("p", "q", "sentence"),
    [
        ("a,b", "1,0", "P: 'a' is not a probability"),
        ("0.5,0.5", "0.5,", "Q: '' is not a probability"),
        ("1/0,0", "1,0", "P: '1/0' is not a probability"),
        ("nan,1", "1,0", "P: 'nan' is not a probability"),
        ("inf,1", "1,0", "P: 'inf' is not a probability"),
        ("0.5,0.6", "1,0", "P sums to 1.1, not to 1"),
        ("1,0", "-0.5,1.5", "Q holds -0.5; a probability is never negative"),
        ("1,0", "1,0,0", "P has 2 outcomes and Q has 3"),
        ("1e999,0", "1,0", "is not a probability"),
    ],
)
def test_what_is_no_distribution_gets_one_sentence(p, q, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_pair(p, q)
