import torch
from helpers import table

from tether.run.metrics import Last, Max, Mean, Meter, Sum


def test_a_mean_weighs_tokens_and_not_batches():
    """Trap 15: 3 tokens that sum to 6 and 1 of 10 average to 4, not to (2 + 10) / 2."""
    meter = Meter()
    meter.record("x", Mean(torch.tensor(6.0), torch.tensor(3)))
    meter.record("x", Mean(torch.tensor(10.0), torch.tensor(1)))
    assert meter.values() == {"x": 4.0}


@table(
    ("first", "second", "together"),
    [
        (Sum(2), Sum(3), 5.0),
        (Max(2), Max(torch.tensor(3.0)), 3.0),
        (Max(4), Max(3), 4.0),
        (Last(2), Last(1), 1.0),
        (Mean(0, 0), Mean(0, 0), 0.0),
    ],
)
def test_metrics_add_up_as_their_kind_says(first, second, together):
    assert first.merge(second).value() == together
