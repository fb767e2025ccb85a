"""TRPO on the tiny model: its Fisher product, its hard bound, and the steps it must refuse.

The KL is recomputed with transformers' own logits, row by row, and not with tether's heads.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
from helpers import logits_before, made_experience
from torch.nn.attention import SDPBackend, sdpa_kernel

from tether.ppo.result import first_controls
from tether.ppo.updates import trpo
from tether.ppo.updates.actor import update_actor
from tether.ppo.updates.trpo import TrustRegion

TRPO = {"actor__update__kind": "trpo", "actor__entropy_coef": 0.0}
EXACT = {**TRPO, "model__dtype": "float64"}


def region_of(roles, config, experience) -> TrustRegion:
    with sdpa_kernel(SDPBackend.MATH):
        return TrustRegion(experience, roles.actor, config)


def cells(experience):
    """(row, prompt, response, column) of every True cell."""
    s = experience.sequences
    for row, ids in enumerate(s.ids.tolist()):
        p, r = int(s.prompt_lengths[row]), int(s.response_lengths[row])
        for t in range(r):
            if experience.response_mask[row, t]:
                yield row, ids[:p], ids[p : p + r], t


def slow_distributions(model, experience, temperature=1.0) -> dict:
    """The log-probs of the whole vocabulary before every True cell, in float64."""
    found, rows = {}, {}
    for row, prompt, response, t in cells(experience):
        if row not in rows:
            logits = logits_before(model, prompt, response).double()
            rows[row] = torch.log_softmax(logits / temperature, dim=-1)
        found[row, t] = rows[row][t]
    return found


def slow_kl(old: dict, new: dict) -> torch.Tensor:
    """Mean over cells of the sum over tokens of p log(p / q)."""
    total = sum((p.exp() * (p - new[cell])).sum() for cell, p in old.items())
    return total / len(old)


def slow_surrogate(new: dict, experience) -> float:
    total = sum(
        float(experience.policy_advantages[row, t])
        * math.exp(float(new[row, t][response[t]]) - float(experience.old_log_probs[row, t]))
        for row, _, response, t in cells(experience)
    )
    return total / len(new)


def on_policy(experience, roles):
    """The same rows, as the actor itself would have sampled them."""
    mask = experience.response_mask
    return replace(experience, old_log_probs=roles.actor.log_probs(experience.sequences, mask))


def weights_of(roles) -> list[torch.Tensor]:
    return [p.detach().clone() for p in roles.actor.model.parameters()]


def same_bytes(before, roles) -> bool:
    after = roles.actor.model.parameters()
    return all(
        a.numpy().tobytes() == b.detach().numpy().tobytes()
        for a, b in zip(before, after, strict=True)
    )


def step(experience, roles, config):
    return update_actor(experience, roles, config, 0, first_controls(config))


def kl_gradient(model, old, experience, temperature) -> torch.Tensor:
    """The gradient of the mean KL from `old`, by transformers' forward."""
    with sdpa_kernel(SDPBackend.MATH):
        kl = slow_kl(old, slow_distributions(model, experience, temperature))
    gradients = torch.autograd.grad(kl, list(model.parameters()))
    return torch.cat([g.reshape(-1) for g in gradients])


@pytest.mark.usefixtures("float64_norms")
@pytest.mark.parametrize("microbatch_tokens", [16_384, 20], ids=["one part", "several"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_fisher_product_is_the_finite_difference_of_the_kls_gradient(
    build, microbatch_tokens, temperature
):
    roles, config = build(
        **EXACT, actor__microbatch_tokens=microbatch_tokens, rollout__temperature=temperature
    )
    experience = on_policy(made_experience(roles), roles)
    region = region_of(roles, config, experience)
    region.nudge *= 1e-4  # as float64 allows
    assert (len(region.microbatches) == 1) == (microbatch_tokens > 20)
    model, generator = roles.actor.model, torch.Generator().manual_seed(3)
    with torch.no_grad():
        old = slow_distributions(model, experience, temperature)
    size = sum(p.numel() for p in region.parameters)
    with sdpa_kernel(SDPBackend.MATH):
        vectors = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2)]
        # Two, so that the weights are seen to return after the first.
        images = [region.fisher_product(v) for v in vectors]
        for v, found in zip(vectors, images, strict=True):
            step, slopes = 1e-4 / v.norm(), []
            for sign in (1, -1):
                region.move(sign * float(step), v)
                slopes.append(kl_gradient(model, old, experience, temperature))
            region.move(0.0, v)
            expected = (slopes[0] - slopes[1]) / (2 * step)
            assert float(expected.norm()) > 1e-3
            assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_the_fisher_product_is_close_in_float32_and_the_weights_return(build):
    """Against a second derivative of the KL, in float64, of the same weights."""
    roles, config = build(**TRPO)
    model, experience = roles.actor.model, on_policy(made_experience(roles), roles)
    region, before = region_of(roles, config, experience), weights_of(roles)
    chance = torch.Generator().manual_seed(3)
    vector = torch.randn(sum(p.numel() for p in region.parameters), generator=chance)
    found = region.fisher_product(vector)
    assert same_bytes(before, roles)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        old = slow_distributions(exact, experience)
    with sdpa_kernel(SDPBackend.MATH):
        weights = list(exact.parameters())
        kl = slow_kl(old, slow_distributions(exact, experience))
        slopes = torch.autograd.grad(kl, weights, create_graph=True)
        along = torch.cat([g.reshape(-1) for g in slopes]) @ vector.double()
        expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(along, weights)])
    assert float((found - expected).norm() / expected.norm()) < 0.01


def test_the_length_of_the_step_obeys_all_rows(build):
    """More rows than a sample of 64 would hold: for a tiny bound the whole step lands on it."""
    roles, config = build(**EXACT, actor__update__max_kl=1e-8)
    experience = on_policy(made_experience(roles, rows=160), roles)
    metrics = step(experience, roles, config).meter.values()
    assert metrics["actor/line_search_tries"] <= 2
    assert metrics["actor/exact_kl"] == pytest.approx(
        metrics["actor/step_share"] ** 2 * 1e-8, rel=0.05
    )


@pytest.mark.parametrize(
    ("updates", "microbatch_tokens"), [pytest.param(40, 16_384, marks=pytest.mark.long), (8, 30)]
)
def test_every_accepted_step_keeps_the_exact_kl_and_most_are_accepted(
    build, updates, microbatch_tokens
):
    """Forty updates on random advantages, each measured by transformers' own logits."""
    max_kl = 0.01
    roles, config = build(
        **TRPO, actor__update__max_kl=max_kl, actor__microbatch_tokens=microbatch_tokens
    )
    model, accepted, better, distances = roles.actor.model, 0, 0, []
    for seed in range(updates):
        experience = on_policy(made_experience(roles, rows=4, seed=seed), roles)
        before = weights_of(roles)
        with torch.no_grad():
            old = slow_distributions(model, experience)
        report = step(experience, roles, config)
        metrics = report.meter.values()
        with torch.no_grad():
            new = slow_distributions(model, experience)
        kl = float(slow_kl(old, new))
        assert kl <= max_kl + 1e-6
        assert metrics["actor/exact_kl"] == pytest.approx(kl, abs=1e-5)
        if metrics["actor/step_share"] == 0:
            assert same_bytes(before, roles)
            assert [event.kind for event in report.events] == ["trpo_refused"]
            continue
        assert report.events == []
        assert not same_bytes(before, roles)
        accepted += 1
        distances.append(kl)
        better += slow_surrogate(new, experience) > slow_surrogate(old, experience)
        assert metrics["actor/pg_loss"] == pytest.approx(-slow_surrogate(new, experience), abs=1e-4)
    assert accepted >= 0.8 * updates
    assert better == accepted
    assert sum(distances) / len(distances) > 0.1 * max_kl  # the bound is used, not shunned


def test_the_step_is_as_long_as_the_bound_allows_when_the_kl_is_quadratic(build):
    """For a tiny bound the quadratic model is exact: the whole step lands on it."""
    roles, config = build(**EXACT, actor__update__max_kl=1e-8)
    metrics = step(on_policy(made_experience(roles), roles), roles, config).meter.values()
    share = metrics["actor/step_share"]  # a hair beyond the bound is stepped back from
    assert share in (1, pytest.approx(0.7))
    assert metrics["actor/exact_kl"] == pytest.approx(share**2 * 1e-8, rel=0.02)
    assert metrics["actor/step_share"] >= 0.7


def assert_refused(experience, roles, config, tries: int, reason: str, kind="trpo_refused"):
    before = weights_of(roles)
    report = step(experience, roles, config)
    assert same_bytes(before, roles)
    assert [event.kind for event in report.events] == [kind]
    assert reason in report.events[0].message
    metrics = report.meter.values()
    assert metrics["actor/step_share"] == 0
    assert metrics["actor/line_search_tries"] == tries
    assert metrics["actor/exact_kl"] == pytest.approx(0, abs=1e-9)
    mask = experience.response_mask
    now = roles.actor.log_probs(experience.sequences, mask)
    torch.testing.assert_close(report.new_log_probs, now, rtol=0, atol=1e-5)


def test_a_zero_gradient_moves_nothing(build):
    roles, config = build(**TRPO)
    experience = made_experience(roles)
    nothing = torch.zeros_like(experience.policy_advantages)
    assert_refused(
        replace(experience, policy_advantages=nothing), roles, config, 0, "gradient norm"
    )


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(build, rubbish):
    roles, config = build(**TRPO)
    experience = made_experience(roles)
    experience.policy_advantages[3, 0] = rubbish
    assert_refused(experience, roles, config, 0, "gradient norm", kind="non_finite_gradient")


def test_no_row_that_counts_moves_nothing(build):
    roles, config = build(**TRPO)
    assert_refused(
        made_experience(roles, unscored=tuple(range(7))), roles, config, 0, "gradient norm"
    )


@pytest.mark.parametrize("backtracks", [0, 3])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda surrogate, kl, moved: (surrogate, 1.0 if moved else kl),  # always too far
        lambda surrogate, kl, moved: (surrogate - moved, kl),  # always worse
        lambda surrogate, kl, moved: (surrogate, math.nan if moved else kl),
        lambda surrogate, kl, moved: (math.nan if moved else surrogate, kl),
    ],
    ids=["too far", "worse", "KL is NaN", "surrogate is NaN"],
)
def test_when_the_backtracks_are_used_up_the_weights_return_bit_for_bit(
    build, monkeypatch, backtracks, spoil
):
    roles, config = build(**TRPO, actor__update__backtracks=backtracks)
    start, measure = weights_of(roles), TrustRegion.measure

    def spoilt(region):
        return spoil(*measure(region), not same_bytes(start, roles))

    monkeypatch.setattr(TrustRegion, "measure", spoilt)
    assert_refused(
        on_policy(made_experience(roles), roles), roles, config, backtracks + 1, "improved"
    )


def test_a_step_that_is_too_long_is_shortened_until_it_is_not(build, monkeypatch):
    """Twenty times the longest step, and a search that may halve it again and again."""
    roles, config = build(**TRPO, actor__update__backtracks=12, actor__update__backtrack_ratio=0.5)
    longest = trpo.longest_step
    monkeypatch.setattr(trpo, "longest_step", lambda *given: 20 * longest(*given))
    experience = on_policy(made_experience(roles), roles)
    with torch.no_grad():
        old = slow_distributions(roles.actor.model, experience)
    metrics = step(experience, roles, config).meter.values()
    with torch.no_grad():
        kl = float(slow_kl(old, slow_distributions(roles.actor.model, experience)))
    assert 0 < kl <= 0.01 + 1e-6
    assert 0 < metrics["actor/step_share"] <= 0.125
    tries = metrics["actor/line_search_tries"]
    assert metrics["actor/step_share"] == 0.5 ** (tries - 1)


def test_a_curvature_that_is_not_finite_moves_nothing(build, monkeypatch):
    roles, config = build(**TRPO)
    monkeypatch.setattr(
        TrustRegion, "fisher_product", lambda region, v: torch.full_like(v, math.nan)
    )
    experience = on_policy(made_experience(roles), roles)
    assert_refused(experience, roles, config, 0, "step is not finite", kind="non_finite_step")


@pytest.mark.parametrize("lr", [1e-12, 1.0])
def test_the_learning_rate_gradient_clipping_epochs_and_minibatches_do_not_apply(build, lr):
    """Bit for bit the same step, no gradient left behind, nothing for Adam to remember."""
    ends = []
    for dotted in ({}, {"actor__lr": lr, "actor__max_grad_norm": 1e-9, "actor__epochs": 5}):
        roles, config = build(**{**TRPO, "actor__minibatch_rows": 2, **dotted})
        step(on_policy(made_experience(roles), roles), roles, config)
        assert not roles.actor_optimizer.adam.state
        assert all(p.grad is None for p in roles.actor.model.parameters())
        ends.append(weights_of(roles))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("microbatch_tokens", [1, 30])
def test_the_step_does_not_depend_on_the_microbatch_split(build, microbatch_tokens):
    """Trap 12."""
    ends = []
    for tokens in (16_384, microbatch_tokens):
        roles, config = build(**EXACT, actor__microbatch_tokens=tokens)
        step(on_policy(made_experience(roles), roles), roles, config)
        ends.append(torch.cat([p.reshape(-1) for p in weights_of(roles)]))
    start = torch.cat([p.detach().reshape(-1) for p in build(**EXACT)[0].actor.model.parameters()])
    moved = ends[0] - start
    assert float(moved.norm()) > 1e-4
    assert float((ends[1] - ends[0]).norm() / moved.norm()) < 1e-5
