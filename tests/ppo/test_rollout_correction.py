"""Where the rollout correction enters a run: the loss, the metrics, the start check."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import changed, distinct_letters, made_experience, read_jsonl

import tether
from tether.errors import RunStopped
from tether.ppo import roles as roles_module
from tether.ppo.iteration import run_iteration
from tether.ppo.result import first_controls
from tether.ppo.selfcheck import check_start
from tether.ppo.updates.trpo import TrustRegion
from tether.rollout.local import LocalSampler


class Astray:
    """Another sampler, whose log-probs are too low by ln 1.5 on even columns."""

    def __init__(self, sampler) -> None:
        self.sampler = sampler

    def sync(self, weights, version) -> None:
        self.sampler.sync(weights, version)

    def run(self, episodes, choice, numbers=None):
        rollout = self.sampler.run(episodes, choice, numbers)
        off = torch.zeros_like(rollout.rollout_log_probs)
        off[:, ::2] = math.log(1.5)
        off = torch.where(rollout.response_mask, off, 0.0)
        return replace(rollout, rollout_log_probs=rollout.rollout_log_probs - off)


def astray(roles):
    return replace(roles, sampler=Astray(roles.sampler))


@pytest.mark.parametrize(
    ("correction", "odd", "even"),
    [
        (None, 1.0, 1.0),
        ({"kind": "none"}, 1.0, 1.0),
        ({"kind": "token", "cap": 2.0}, 1.0, 1.5),
        ({"kind": "token", "cap": 1.2}, 1.0, 1.2),
    ],
)
def test_an_iteration_weighs_tokens_as_configured(build, correction, odd, even):
    roles, config = build(rollout__correction=correction)
    outcome = run_iteration(0, first_controls(config), astray(roles), config)
    weights, mask = outcome.experience.correction_weights, outcome.experience.response_mask
    expected = torch.full_like(weights, odd)
    expected[:, ::2] = even
    torch.testing.assert_close(weights, torch.where(mask, expected, 0.0), rtol=0, atol=1e-4)


def test_a_row_is_weighed_as_a_whole(build):
    roles, config = build(rollout__correction={"kind": "sequence", "cap": 4.0})
    sampler = LocalSampler(frozenset(range(0, 256, 8)), 12, 1.0)  # rows of many lengths
    roles = replace(roles, sampler=Astray(sampler))
    outcome = run_iteration(0, first_controls(config), roles, config)
    weights, mask = outcome.experience.correction_weights, outcome.experience.response_mask
    lengths = mask.sum(dim=1).tolist()
    assert len(set(lengths)) > 1
    for row, length in enumerate(lengths):
        weight = min(4.0, 1.5 ** math.ceil(length / 2))
        assert weights[row, :length].tolist() == pytest.approx([weight] * length, abs=1e-3)
        assert not weights[row, length:].any()


def test_the_metrics_say_how_far_the_sampler_was_off(build):
    roles, config = build(rollout__correction={"kind": "none"})
    assert "rollout/mismatch_kl" not in run_iteration(
        0, first_controls(config), roles, config
    ).metrics(config)
    roles, config = build(rollout__correction={"kind": "token"})
    outcome = run_iteration(0, first_controls(config), astray(roles), config)
    metrics, mask = outcome.metrics(config), outcome.experience.response_mask
    even = float(mask[:, ::2].sum() / mask.sum())
    assert metrics["rollout/log_prob_diff_mean"] == pytest.approx(even * math.log(1.5), abs=1e-4)
    kl = even * (1.5 - math.log(1.5) - 1)
    assert metrics["rollout/mismatch_kl"] == pytest.approx(kl, abs=1e-4)
    share = (1.5 * even + (1 - even)) ** 2 / (2.25 * even + (1 - even))
    assert metrics["rollout/effective_share"] == pytest.approx(share, abs=1e-4)


def test_trpo_s_surrogate_is_weighed_too(build):
    """It is linear in the advantages, so weights and weighed advantages are the same thing."""
    roles, config = build(actor__update={"kind": "trpo"}, actor__entropy_coef=0.0)
    plain = made_experience(roles)
    weights = torch.linspace(0.5, 2.0, plain.response_mask.numel()).view_as(plain.advantages)
    weighed = replace(plain, correction_weights=weights)
    by_hand = replace(plain, policy_advantages=plain.policy_advantages * weights)
    found, expected, without = (
        TrustRegion(e, roles.actor, config).surrogate_gradient() for e in (weighed, by_hand, plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert (found - without).norm() > 0.1 * without.norm()


class Silent:
    """An engine that nobody asks."""

    def load(self, weights) -> None: ...

    def rest(self) -> None: ...

    def generate(self, requests) -> list: ...


def test_another_engine_s_gap_is_reported_at_the_start_and_no_stop(build, monkeypatch):
    monkeypatch.setattr(roles_module, "build_vllm", lambda config, vocabulary: Silent())
    roles, config = build(rollout__sampler="vllm")
    limits = config.rollout.max_response_tokens, config.rollout.temperature
    other = Astray(LocalSampler(roles.vocabulary.eos_ids, *limits))
    assert "sampler = trainer (±4e-01)" in check_start(replace(roles, sampler=other), config)


def test_an_engine_that_has_other_weights_stops_the_run(build, monkeypatch):
    """Weights that did not arrive are off by nats: vLLM only warns of what it did not get."""
    monkeypatch.setattr(roles_module, "build_vllm", lambda config, vocabulary: Silent())
    roles, config = build(rollout__sampler="vllm")
    limits = config.rollout.max_response_tokens, config.rollout.temperature

    class Other(LocalSampler):
        shift = 0.0

        def run(self, episodes, choice, numbers=None):
            rollout = super().run(episodes, choice, numbers)
            return replace(rollout, rollout_log_probs=rollout.rollout_log_probs + self.shift)

    sampler = Other(roles.vocabulary.eos_ids, *limits)
    for shift in (0.51, -0.51, float("nan")):
        sampler.shift = shift
        with pytest.raises(RunStopped, match="does not sample from the actor's weights"):
            check_start(replace(roles, sampler=sampler), config)
    sampler.shift = 0.45
    assert "ratio 1" in check_start(replace(roles, sampler=sampler), config)


def test_a_run_with_weights_of_one_is_the_run_without(scored_config, tmp_path):
    runs = []
    for name, correction in (("a", None), ("b", {"kind": "token", "cap": 1.0})):
        config = changed(
            scored_config,
            run__dir=str(tmp_path / name),
            rollout__correction=correction,
            data__heldout=None,
        )
        run = tether.train(config, reward=distinct_letters).run
        runs.append(read_jsonl(run / "metrics.jsonl"))
        [row, *_] = read_jsonl(run / "rollouts" / "000000.jsonl")
        assert ("correction_weights" in row) == (correction is not None)
    assert row["correction_weights"] == pytest.approx([1.0] * len(row["response_ids"]), abs=1e-4)
    for plain, corrected in zip(*runs, strict=True):
        assert corrected["rollout/effective_share"] == pytest.approx(1.0, abs=1e-6)
        assert corrected["actor/pg_loss"] == pytest.approx(plain["actor/pg_loss"], abs=1e-4)
        assert "rollout/effective_share" not in plain
