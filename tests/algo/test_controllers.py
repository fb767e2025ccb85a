import pytest
from helpers import table

from tether.algo.kl import adaptive_beta, adaptive_penalty


@table(
    ("kl", "expected"),
    [
        (6.6, 0.1 * (1 + 0.1 * 256 / 10_000)),  # a tenth above the target
        (60.0, 0.1 * (1 + 0.2 * 256 / 10_000)),  # far above: a fifth at most
        (6.0, 0.1),
        (5.4, 0.1 * (1 - 0.1 * 256 / 10_000)),
        (0.0, 0.1 * (1 - 0.2 * 256 / 10_000)),
    ],
)
def test_adaptive_beta_by_hand(kl, expected):
    assert adaptive_beta(0.1, kl, target=6.0, rows=256, horizon=10_000) == pytest.approx(expected)


def test_a_whole_horizon_of_rows_far_off_target_moves_beta_by_a_fifth():
    assert adaptive_beta(1.0, 100.0, 6.0, rows=500, horizon=500) == pytest.approx(1.2)
    assert adaptive_beta(1.0, 0.0, 6.0, rows=500, horizon=500) == pytest.approx(0.8)


@table(
    ("kl", "expected"),
    [
        (0.0, 0.5),
        (0.0199, 0.5),  # below 0.03 / 1.5
        (0.0201, 1.0),
        (0.0449, 1.0),
        (0.0451, 2.0),  # above 1.5 x 0.03
        (9.0, 2.0),
    ],
)
def test_a_penalty_is_halved_and_doubled_outside_its_band(kl, expected):
    assert adaptive_penalty(1.0, kl, target=0.03) == expected
