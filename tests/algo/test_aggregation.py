"""Four ways from losses a token to one number, against sums done by hand."""

import pytest
import torch
from helpers import table

from tether.algo.masked import cell_weights, weighted_sum

# Rows of 1, 3 and 0 counted tokens; max_response_tokens is 10, the width only 3.
MASK = torch.tensor([[True, False, False], [True, True, True], [False, False, False]])
LOSSES = torch.tensor([[6.0, 99.0, 99.0], [1.0, 2.0, 3.0], [99.0, 99.0, 99.0]]).double()


@table(
    ("mode", "expected"),
    [
        ("token_mean", (6 + 1 + 2 + 3) / 4),
        ("seq_mean_token_mean", (6 + 2) / 2),
        ("seq_mean_token_sum", (6 + 6) / 2),
        ("seq_mean_token_sum_norm", (6 + 6) / 2 / 10),
    ],
)
def test_modes_weigh_tokens_as_they_say(mode, expected):
    weights = cell_weights(mode, MASK, max_response_tokens=10, dtype=torch.float64)
    assert float(weighted_sum(LOSSES, weights)) == pytest.approx(expected, abs=1e-12)
    # a split into microbatches keeps the weights that were counted over the whole
    parts = sum(float(weighted_sum(LOSSES[i : i + 1], weights[i : i + 1])) for i in range(3))
    assert parts == pytest.approx(expected, abs=1e-12)


@table(
    "mode", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
)
def test_nothing_that_counts_gives_zero_and_masked_nan_is_not_seen(mode):
    nothing = torch.zeros_like(MASK)
    weights = cell_weights(mode, nothing, 10, torch.float64)
    assert float(weighted_sum(torch.full_like(LOSSES, torch.nan), weights)) == 0.0
