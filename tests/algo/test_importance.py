"""The rollout correction, by hand: ln 2 = 0.6931472 is all the arithmetic there is."""

import math

import torch
from helpers import f64, grids, numbers, table
from hypothesis import given
from hypothesis import strategies as st

from tether.algo.importance import (
    correction_weights,
    effective_share,
    mean_gap,
    mismatch,
    mismatch_kl,
)

LN2 = math.log(2)
MASK = torch.tensor([[True, True], [True, False]])
# The trainer gives the first token twice the sampler's probability, the second half of it, the
# third four times; the last cell is no token.
ROLLOUT = f64([[-1.0, -2.0], [-3.0, math.nan]])
OLD = f64([[-1.0 + LN2, -2.0 - LN2], [-3.0 + 2 * LN2, 5.0]])
D = f64([[LN2, -LN2], [2 * LN2, 0.0]])


def close(x: torch.Tensor, expected: list | float) -> None:
    torch.testing.assert_close(x, torch.tensor(expected, dtype=x.dtype), rtol=0, atol=1e-6)


def test_the_mismatch_is_zero_where_no_token_was_sampled():
    close(mismatch(OLD, ROLLOUT, MASK), D.tolist())


@table(
    ("kind", "cap", "expected"),
    [
        ("none", 2.0, [[1, 1], [1, 0]]),
        ("token", 2.0, [[2, 0.5], [2, 0]]),  # 4 is capped
        ("token", 5.0, [[2, 0.5], [4, 0]]),
        ("token", 1.0, [[1, 0.5], [1, 0]]),
        ("sequence", 2.0, [[1, 1], [2, 0]]),  # 2 x 1/2 of the first row; 4, capped
        ("sequence", 5.0, [[1, 1], [4, 0]]),
    ],
)
def test_weights_are_the_capped_ratio_of_a_token_or_of_its_row(kind, cap, expected):
    close(correction_weights(kind, D, MASK, cap), [[float(x) for x in row] for row in expected])


def test_weights_carry_no_gradient():
    d = D.clone().requires_grad_()
    for kind in ("none", "token", "sequence"):
        assert not correction_weights(kind, d, MASK, 2.0).requires_grad


def test_what_is_reported_of_the_mismatch():
    close(mean_gap(D, MASK), 4 * LN2 / 3)
    # 2 - ln 2 - 1, 1/2 + ln 2 - 1 and 4 - 2 ln 2 - 1
    close(mismatch_kl(D, MASK), (0.3068528 + 0.1931472 + 1.6137056) / 3)
    # Weights 2, 1/2, 4: 6.5^2 / (3 x 20.25), though a cap of 2 would make it 4.5^2 / (3 x 8.25).
    close(effective_share(D, MASK), 42.25 / 60.75)
    # Of the rows: 1 and 4.
    close(effective_share(D.sum(dim=1), MASK.any(dim=1)), 25 / 34)


def test_the_effective_share_neither_overflows_nor_needs_a_token():
    close(effective_share(f64([800.0, 800.0]), torch.tensor([True, True])), 1.0)
    close(effective_share(f64([800.0, 0.0]), torch.tensor([True, True])), 0.5)
    close(effective_share(f64([3.0, 4.0]), torch.tensor([False, False])), 1.0)
    close(mismatch_kl(f64([[3.0]]), torch.tensor([[False]])), 0.0)


def test_a_mean_over_the_sampler_becomes_one_over_the_trainer():
    """Two tokens, drawn half and half by the sampler; the trainer would draw them 60 : 40."""
    rollout, old = f64([[0.5], [0.5]]).log(), f64([[0.6], [0.4]]).log()
    every = torch.ones(2, 1, dtype=torch.bool)
    weights = correction_weights("token", mismatch(old, rollout, every), every, 2.0)
    value = f64([[10.0], [20.0]])
    close((f64([[0.5], [0.5]]) * weights * value).sum(), 0.6 * 10 + 0.4 * 20)
    # KL(rollout || old) = ln 0.5 - (ln 0.6 + ln 0.4) / 2, as each token was drawn once.
    close(mismatch_kl(mismatch(old, rollout, every), every), 0.0204110)


@given(grids(numbers, st.booleans()))
def test_equal_log_probs_leave_everything_as_it_is(cells):
    values, kept = cells
    log_probs, mask = f64(values), torch.tensor(kept)
    d = mismatch(log_probs, log_probs, mask)
    for kind in ("none", "token", "sequence"):
        assert correction_weights(kind, d, mask, 1.0).equal(mask.double())
    assert mean_gap(d, mask) == mismatch_kl(d, mask) == 0
    close(effective_share(d, mask), 1.0)
