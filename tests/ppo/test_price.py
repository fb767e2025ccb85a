"""The price of a point: what was spent beside the least, where both are known."""

import json
import math

import pytest
import torch
from helpers import changed, table

import tether
from tether.algo.random import uniform
from tether.config.load import load_config
from tether.errors import UserError
from tether.ppo.estimates import Interval
from tether.ppo.evaluate import read_evaluations
from tether.ppo.price import Price, compare
from tether.types import Scores

RATES = torch.linspace(0.05, 0.6, 200, dtype=torch.float64)  # of the reference, by prompt
SAMPLES = 64


def reference() -> Scores:
    draws = torch.stack([uniform(0, "test", i, torch.arange(SAMPLES).numpy()) for i in range(200)])
    values = (draws < RATES[:, None]).double().flatten()
    known = torch.ones(len(values), dtype=torch.bool)
    return Scores(values, known, known)


def tilted(eta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The best policy: scores and KL of each prompt."""
    q = RATES * math.exp(eta) / (RATES * math.exp(eta) + 1 - RATES)
    return q, q * (q / RATES).log() + (1 - q) * ((1 - q) / (1 - RATES)).log()


def test_the_best_policy_wastes_nothing():
    """The bandit's optimum with one eta for all prompts, from 64 samples of the reference each."""
    scores, spent = tilted(1.5)
    found = compare(scores, spent, reference(), SAMPLES, seed=0)
    assert found.spent.mean == pytest.approx(float(spent.mean()))
    assert found.least.low <= float(spent.mean()) <= found.least.high
    assert abs(found.wasted.mean) < 0.06
    assert found.wasted.low < 0 < found.wasted.high


def test_what_is_spent_beyond_the_least_is_wasted():
    """Another eta for every prompt has a worse price: 0 and 3 alternate, mean score as it comes."""
    (low, none), (high, much) = tilted(0.0), tilted(3.0)
    odd = torch.arange(200) % 2 == 1
    scores, spent = torch.where(odd, high, low), torch.where(odd, much, none)
    eta = torch.linspace(0, 3, 3001, dtype=torch.float64)[:, None]
    q = RATES * eta.exp() / (RATES * eta.exp() + 1 - RATES)
    best = int((q.mean(dim=1) - scores.mean()).abs().argmin())
    least = float(tilted(float(eta[best]))[1].mean())
    found = compare(scores, spent, reference(), SAMPLES, seed=0)
    assert found.least.mean == pytest.approx(least, rel=0.06)
    assert found.wasted.low > 0.2
    assert found.wasted.mean == pytest.approx(1 - least / float(spent.mean()), abs=0.04)


def test_a_score_out_of_reach_is_said():
    """Of one prompt no reference sample is right; of the others at least one is."""
    ones, scores = torch.ones(200).double(), reference()
    found = compare(ones, ones, scores, SAMPLES, 0)
    shares = scores.values.view(200, SAMPLES).mean(dim=1)
    assert found.least.mean == pytest.approx(-float(shares.log().mean()), abs=0.1)
    scores.values[:SAMPLES] = 0
    found = compare(ones, ones, scores, SAMPLES, 0)
    assert (found.least.mean, found.never_right) == (math.inf, 1 / 200)
    assert "cannot be told" in str(found)


def test_the_line_for_a_person():
    price = Price(
        Interval(2.0, 1.5, 2.5), Interval(0.5, 0.4, 0.6), Interval(0.75, 0.7, 0.8), 64, 0.1
    )
    assert str(price) == (
        "KL spent 2.000 (1.500 – 2.500) nats, the least for this score 0.500 (0.400 – 0.600); "
        "wasted 75% (70% – 80%)"
    )


def test_the_end_of_a_run_has_a_price(tiny_config):
    """In the last line of evals.jsonl; the KL spent is the one of the evaluation."""
    config = changed(
        tiny_config, train__iterations=1, train__price_samples=64, train__eval_prompts=3
    )
    result = tether.train(config, reward=lambda response: len(set(response)) / 10)
    first, last = [json.loads(x) for x in (result.run / "evals.jsonl").open()]
    assert "price" not in first
    assert last["price"]["spent"]["mean"] == pytest.approx(last["kl"], abs=1e-6)
    assert last["price"]["least"]["mean"] >= 0
    assert read_evaluations(result.run)[-1].price == result.after.price


@table(
    ("fields", "complaint"),
    [
        ({"train.price_samples": 8}, "write 64 or more, or 0"),
        ({"train.price_samples": 64, "kl.in_reward.coef": 0}, "needs the KL to a reference"),
        ({"train.price_samples": 64, "kl.refresh_reference_every": 5}, "a reference that stays"),
    ],
)
def test_a_price_without_a_sound_bound_is_refused(fields, complaint):
    with pytest.raises(UserError, match=complaint):
        load_config("arithmetic", fields)
