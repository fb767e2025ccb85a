import math

import pytest
import torch

from tether.train.evaluate import Estimate, estimate, evaluate, wilson
from tether.types import Scores


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        (5, 10, 0.236593, 0.763407),
        (8, 10, 0.490162, 0.943318),
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (50, 100, 0.403832, 0.596168),
        (1, 1, 0.206549, 1.0),
    ],
)
def test_wilsons_interval_by_hand(successes, count, low, high):
    assert wilson(successes / count, count) == pytest.approx((low, high), abs=1e-5)


@pytest.mark.parametrize("count", range(1, 60))
def test_wilsons_interval_stays_inside_zero_and_one(count):
    assert wilson(0.0, count)[0] >= 0.0
    assert wilson(1.0, count)[1] <= 1.0


def scores(*values: float | None) -> Scores:
    numbers = torch.tensor([v or 0.0 for v in values])
    scored = torch.tensor([v is not None for v in values])
    return Scores(numbers, scored, scored)


def test_unscored_rows_leave_the_estimate():
    found = estimate(scores(1.0, None, 0.0, 1.0, 1.0, None))
    assert (found.mean, found.count, found.binary) == (0.75, 4, True)
    assert (found.low, found.high) == pytest.approx(wilson(0.75, 4))


def test_other_scores_get_the_normal_interval():
    """0.5, 1, 1.5, 2 have standard deviation sqrt(5/12); 1.96 of it over sqrt(4)."""
    found = estimate(scores(0.5, 1.0, 1.5, 2.0))
    half = 1.959964 * math.sqrt(5 / 12) / 2
    assert not found.binary
    assert (found.mean, found.low, found.high) == pytest.approx((1.25, 1.25 - half, 1.25 + half))


def test_intervals_that_do_not_touch_are_apart():
    low, middle, high = (Estimate(m, m - 0.1, m + 0.1, 9, True) for m in (0.2, 0.35, 0.6))
    assert high.apart_from(low)
    assert low.apart_from(high)
    assert not low.apart_from(middle)


def test_an_evaluation_scores_each_prompt_greedily_and_sampled_and_measures_the_kl(build):
    """By hand: scores of the greedy rows' texts; KL 0 to an equal reference, more to another."""
    roles, config = build()
    prompts = roles.heldout_prompts.first(5)
    first, events = evaluate(0, prompts, roles, config)
    assert events == []
    assert first.greedy.count == first.sampled.count == 5
    assert first.kl == pytest.approx(0, abs=1e-5)
    assert evaluate(3, prompts, roles, config)[0].sampled == first.sampled  # the same draws
    with torch.no_grad():
        for weight in roles.reference.policy.model.parameters():
            weight.mul_(0.8)
    assert evaluate(0, prompts, roles, config)[0].kl > 0.1
