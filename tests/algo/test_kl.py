import math

import pytest
import torch
from helpers import f64, grids, numbers, table
from hypothesis import given
from hypothesis import strategies as st

from tether.algo.kl import exact_kl, k1, k3, sequence_k2

# WORKED_EXAMPLES.md: P, Q, KL(P||Q) in nats and bits, KL(Q||P) in nats and bits.
EXACT = {
    "die": ([1 / 6] * 6, [0.1] * 5 + [0.5], 0.242586, 0.349978, 0.293893, 0.423998),
    "coin": ([0.8, 0.2], [0.7, 0.3], 0.025732, 0.037124, 0.028168, 0.040637),
    "tokens": ([0.3, 0.4, 0.3], [0.5, 0.3, 0.2], 0.083465, 0.120414, 0.088015, 0.126979),
    "tokens 2": ([0.6, 0.3, 0.1], [0.7, 0.2, 0.1], 0.029149, 0.042053, 0.026812, 0.038682),
    "weather": ([0.7, 0.2, 0.1], [0.5, 0.3, 0.2], 0.085123, 0.122806, 0.092033, 0.132775),
    "forecaster": ([0.8, 0.2], [0.9, 0.1], 0.044403, 0.064060, 0.036690, 0.052933),
    "mild": (
        [0.4, 0.3, 0.2, 0.1],
        [0.45, 0.35, 0.15, 0.05],
        *(0.033493, 0.048320, 0.029145, 0.042048),
    ),
    "wild": (
        [0.4, 0.3, 0.2, 0.1],
        [0.8, 0.1, 0.05, 0.05],
        *(0.398898, 0.575489, 0.340684, 0.491504),
    ),
    "grades": (
        [0.1, 0.3, 0.4, 0.2],
        [0.05, 0.25, 0.5, 0.2],
        *(0.034754, 0.050139, 0.031334, 0.045205),
    ),
}

# The six response tokens of WORKED_EXAMPLES.md.
OLD = [-0.12, -0.08, -0.15, -0.10, -0.05, -0.02]
REF = [-0.15, -0.10, -0.18, -0.12, -0.08, -0.03]
ALL = torch.ones(6, dtype=torch.bool)


@table("name", EXACT)
def test_exact_kl_gives_the_worked_examples_both_ways_in_nats_and_bits(name):
    p, q, nats, bits, back_nats, back_bits = EXACT[name]
    found = [exact_kl(p, q), exact_kl(p, q) / math.log(2)]
    found += [exact_kl(q, p), exact_kl(q, p) / math.log(2)]
    assert found == pytest.approx([nats, bits, back_nats, back_bits], abs=1e-6)


def test_exact_kl_is_infinite_only_where_q_is_zero_and_p_is_not():
    assert exact_kl([0.5, 0.5], [1.0, 0.0]) == math.inf
    assert exact_kl([1.0, 0.0], [0.5, 0.5]) == pytest.approx(math.log(2))
    assert exact_kl([1.0, 0.0], [1.0, 0.0]) == 0.0


@table(
    ("p", "q"),
    [([0.5, 0.4], [0.5, 0.5]), ([0.5, 0.5], [1.5, -0.5]), ([1.0], [0.5, 0.5])],
)
def test_exact_kl_refuses_what_is_no_pair_of_distributions(p, q):
    with pytest.raises(ValueError, match=r"not a distribution|outcomes"):
        exact_kl(p, q)


def test_k1_and_k3_of_the_six_token_example():
    found = k1(f64(OLD), f64(REF), ALL)
    assert found.tolist() == pytest.approx([0.03, 0.02, 0.03, 0.02, 0.03, 0.01], abs=1e-12)
    assert float(found.sum()) == pytest.approx(0.14)
    expected = [0.00044553, 0.00019867, 0.00044553, 0.00019867, 0.00044553, 0.00004983]
    assert k3(f64(OLD), f64(REF), ALL).tolist() == pytest.approx(expected, abs=1e-8)


def test_k1_of_the_sampled_tokens_keeps_its_negative_values():
    """search, think, answer, search: log(current / reference), mean -0.024291."""
    current, reference = [0.7, 0.2, 0.1, 0.7], [0.6, 0.3, 0.1, 0.6]
    found = k1(f64(current).log(), f64(reference).log(), torch.ones(4, dtype=torch.bool))
    assert found.tolist() == pytest.approx([0.154151, -0.405465, 0, 0.154151], abs=1e-6)
    assert float(found.mean()) == pytest.approx(-0.024291, abs=1e-6)


distributions = st.lists(st.floats(0.01, 1), min_size=5, max_size=5).map(
    lambda weights: [w / math.fsum(weights) for w in weights]
)


@given(distributions, distributions)
def test_averaged_over_the_actor_k1_and_k3_are_the_actors_divergence_from_the_reference(p, q):
    """Direction: KL(pi || pi_ref), by a sum over all outcomes."""
    by_hand = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    everywhere = torch.ones(5, dtype=torch.bool)
    for estimator in (k1, k3):
        mean = (f64(p) * estimator(f64(p).log(), f64(q).log(), everywhere)).sum()
        assert float(mean) == pytest.approx(by_hand, abs=1e-9)


@given(grids(numbers, numbers))
def test_k3_is_never_negative(cells):
    log_probs, ref_log_probs = map(f64, cells)
    assert (k3(log_probs, ref_log_probs, torch.ones_like(log_probs).bool()) >= 0).all()


def test_k3_clamps_the_log_ratio_at_twenty_and_nothing_else():
    q = f64([-10.0, -30.0, 30.0])
    found = k3(q, torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.bool))
    expected = [math.exp(10) - 11, math.exp(20) - 21, math.exp(-20) + 19]
    assert found.tolist() == pytest.approx(expected)


@table("estimator", [k1, k3])
def test_masked_cells_are_zero_whatever_they_held(estimator):
    rubbish = f64([math.nan, math.inf, 1.0])
    assert estimator(rubbish, f64([0.0, 0.0, 0.0]), torch.zeros(3).bool()).tolist() == [0, 0, 0]


def test_the_kl_of_whole_responses_by_hand():
    """Rows with q 0.5, -0.2 and 0.3 (the middle one masked): (0.5 + 0.3)²/2 = 0.32 on the last
    token; a row without a sampled token has none. A response e^0.1 times as likely as when it was
    sampled weighs e^0.1."""
    new, ref = f64([[0.5, -0.2, 0.3], [9.0, 9, 9]]), f64([[0.0, 0, 0], [0, 0, 0]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert sequence_k2(new, new, ref, mask).tolist() == [[0, 0, pytest.approx(0.32)], [0, 0, 0]]
    old = new - f64([[0.04, 7.0, 0.06], [1.0, 1, 1]])
    found = sequence_k2(new, old, ref, mask)[0, 2]
    assert float(found) == pytest.approx(0.32 * math.exp(0.1))


@given(grids(numbers, numbers, st.booleans()))
def test_the_gradient_of_a_responses_kl_is_its_sum_on_every_token(cells):
    """d/d log pi_t of (sum q)²/2 is the sum of q, at every sampled token alike."""
    log_probs, ref, mask = cells
    new, flags = f64(log_probs).requires_grad_(), torch.tensor(mask)
    sequence_k2(new, new.detach(), f64(ref), flags).sum().backward()
    for row, marks in enumerate(mask):
        total = sum(p - q for p, q, m in zip(log_probs[row], ref[row], marks, strict=True) if m)
        expected = [total if m else 0.0 for m in marks]
        assert new.grad[row].tolist() == pytest.approx(expected, abs=1e-9)
