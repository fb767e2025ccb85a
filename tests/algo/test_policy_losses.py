"""Every policy loss: values by hand, gradients by central differences in float64."""

import math
import statistics

import pytest
import torch
from helpers import table
from hypothesis import given
from hypothesis import strategies as st

from tether.algo.kl import estimate_kl, full_kl, k3
from tether.algo.losses import (
    POLICY_LOSSES,
    LossInputs,
    PolicyLoss,
    binary_kl,
    log_ratio,
    policy_loss,
    squared_value_loss,
)
from tether.config import UPDATE_KINDS, ActorSection

MASK = torch.tensor([[True, True, False], [True, True, True]])


def one(x: float) -> torch.Tensor:
    return torch.tensor([[x]], dtype=torch.float64)


def at_ratio(ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
    return one(math.log(0.3 * ratio)), one(math.log(0.3))


ONE_CELL = torch.ones(1, 1, dtype=torch.bool)


def loss_of(new, old, advantages, mask=None, kl_from_old=None, **update) -> PolicyLoss:
    """The loss by a config's section, as a recipe would give it."""
    mask = torch.ones_like(new, dtype=torch.bool) if mask is None else mask
    section = ActorSection(update=update).update
    return policy_loss(section, LossInputs(new, old, advantages, mask, kl_from_old))


def test_every_kind_of_update_has_a_loss_and_a_formula():
    assert set(POLICY_LOSSES) == set(UPDATE_KINDS)
    for kind in UPDATE_KINDS:
        assert ActorSection(update={"kind": kind}).update.formula


def test_cpi_is_minus_ratio_times_advantage():
    loss = loss_of(*at_ratio(2.0), one(3.0), kind="cpi")
    assert float(loss.per_token) == pytest.approx(-6.0)
    assert float(loss.ratio) == pytest.approx(2.0)
    assert not loss.clipped.any()
    assert loss.outside is None


def test_penalty_adds_the_kl_from_the_old_policy():
    loss = loss_of(*at_ratio(2.0), one(1.0), kl_from_old=one(0.3), kind="penalty", coef=10.0)
    assert float(loss.per_token) == pytest.approx(-2.0 + 10 * 0.3)


def test_the_sampled_kl_from_the_old_policy_is_k3_of_old_against_new():
    new, old = at_ratio(2.0)  # e^D - 1 - D with D = log 2
    assert float(k3(old, new, ONE_CELL)) == pytest.approx(2 - 1 - math.log(2))


def test_reinforce_is_minus_advantage_times_log_prob():
    loss = loss_of(*at_ratio(2.0), one(2.0), kind="reinforce")
    assert float(loss.per_token) == pytest.approx(-2 * math.log(0.6))


@table(
    ("ratio", "advantage", "expected"),
    [
        (1.5, -1.0, 1.5),  # as without it
        (5.0, -1.0, 3.0),  # held at 3
        (5.0, 1.0, -1.2),  # positive advantages are none of its business
        (0.5, -1.0, 0.8),
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(ratio, advantage, expected):
    loss = loss_of(*at_ratio(ratio), one(advantage), kind="clip", dual_clip=3.0)
    assert float(loss.per_token) == pytest.approx(expected)
    assert bool(loss.clipped_dual) is (expected == 3.0)


def test_asymmetric_clip_has_two_edges():
    high = loss_of(*at_ratio(1.25), one(1.0), eps_low=0.2, eps_high=0.3)
    assert float(high.per_token) == pytest.approx(-1.25)
    low = loss_of(*at_ratio(0.7), one(-1.0), eps_low=0.2, eps_high=0.5)
    assert float(low.per_token) == pytest.approx(0.8)
    assert bool(low.clipped_low)
    assert not bool(low.clipped_high)


def test_gspo_gives_every_token_the_ratio_of_its_row():
    old = torch.zeros(1, 3).double()
    new = torch.tensor([[0.1, 0.3, 9.0]]).double()
    wide = {"kind": "gspo", "eps_low": 0.9, "eps_high": 9.0}
    loss = loss_of(new, old, torch.ones(1, 3).double(), MASK[:1], **wide)
    assert loss.ratio[0, :2].tolist() == pytest.approx([math.exp(0.2)] * 2)


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    new, old = at_ratio(5.0)
    new.requires_grad_()
    loss = loss_of(new, old, one(2.0), kind="cispo", eps_low=1.0, eps_high=0.28)
    loss.per_token.sum().backward()
    assert float(new.grad) == pytest.approx(-1.28 * 2.0)
    assert bool(loss.clipped_high)


@table(
    ("update", "old", "new", "advantage", "loss", "side"),
    [
        # |0.45 - 0.3| = 0.15 is the bound itself, 0.46 is beyond it; A < 0 pushes it back.
        ({}, 0.30, 0.44, 1.0, -0.44 / 0.30, ""),
        ({}, 0.30, 0.46, 1.0, 0.0, "high"),
        ({}, 0.30, 0.46, -1.0, 0.46 / 0.30, ""),
        ({}, 0.30, 0.14, -1.0, 0.0, "low"),
        ({}, 0.30, 0.14, 1.0, -0.14 / 0.30, ""),
        # A ratio of 10 is near where the token is rare, one of 0.82 far where it is common.
        ({}, 0.01, 0.10, 1.0, -10.0, ""),
        ({}, 0.99, 0.81, -1.0, 0.0, "low"),
        # 0.3 log(0.3 / 0.6) + 0.7 log(0.7 / 0.4) = 0.183787
        ({"divergence": "kl", "max_divergence": 0.1837}, 0.30, 0.60, 1.0, 0.0, "high"),
        ({"divergence": "kl", "max_divergence": 0.1838}, 0.30, 0.60, 1.0, -2.0, ""),
        # the other way round, 0.6 log 2 + 0.4 log(4 / 7) = 0.192042
        ({"divergence": "kl", "max_divergence": 0.1920}, 0.60, 0.30, -1.0, 0.0, "low"),
        ({"divergence": "kl", "max_divergence": 0.1921}, 0.60, 0.30, -1.0, 0.5, ""),
    ],
)
def test_dppo_drops_a_token_that_has_moved_too_far_the_way_of_its_advantage(
    update, old, new, advantage, loss, side
):
    leaf = one(math.log(new)).requires_grad_()
    found = loss_of(leaf, one(math.log(old)), one(advantage), kind="dppo", **update)
    [gradient] = torch.autograd.grad(found.per_token.sum(), leaf)
    assert float(found.per_token.detach()) == pytest.approx(loss)
    assert float(gradient) == pytest.approx(loss)  # d r / d log pi_new = r
    assert bool(found.clipped_high) is (side == "high")
    assert bool(found.clipped_low) is (side == "low")


@given(
    st.floats(1e-6, 1 - 1e-6),
    st.floats(1e-6, 1 - 1e-6),
    st.floats(-3, 3),
    st.sampled_from(["tv", "kl"]),
    st.floats(0.01, 1.0),
)
def test_dppo_never_pushes_a_token_further_beyond_its_bound(old, new, advantage, name, bound):
    """And inside it, or on the way back, the gradient is that of the bare surrogate."""
    kl = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
    distance = abs(new - old) if name == "tv" else kl
    if abs(distance - bound) < 1e-9 or abs(new - old) < 1e-9:
        return
    leaf = one(math.log(new)).requires_grad_()
    update = {"kind": "dppo", "divergence": name, "max_divergence": bound}
    found = loss_of(leaf, one(math.log(old)), one(advantage), **update)
    [gradient] = torch.autograd.grad(found.per_token.sum(), leaf)
    away = (new - old) * advantage > 0
    expected = 0.0 if distance > bound and away else -advantage * new / old
    assert float(gradient) == pytest.approx(expected, rel=1e-9)
    assert bool(found.clipped) is (distance > bound and away)


@table("dtype", [torch.float32, torch.float64])
def test_a_token_that_became_certain_has_a_finite_divergence(dtype):
    certain, likely = torch.zeros(1, 1, dtype=dtype), torch.full((1, 1), -0.1, dtype=dtype)
    for old, new in ((certain, likely), (likely, certain), (certain, certain)):
        assert binary_kl(old, new).isfinite().all()
    assert float(binary_kl(certain, likely)) == pytest.approx(0.1)
    assert float(binary_kl(likely, certain)) > 1.0


def test_squared_value_loss_is_half_the_square():
    assert float(squared_value_loss(one(3.0), one(1.0)).per_token) == pytest.approx(2.0)


def random_case():
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(2, 3, generator=generator, dtype=torch.float64)  # noqa: E731
    return -1 + 0.3 * draw(), -1 + 0.3 * draw(), draw(), -1 + 0.3 * draw()


NEW, OLD, ADVANTAGES, REF = random_case()
FROZEN = (NEW - OLD).clamp(-20, 20).exp()  # ratio at the point of differentiation


def gspo_frozen(new):
    """GSPO with its stop-gradient parts as constants: the row's mean log-ratio at NEW."""
    mean = torch.where(MASK, NEW - OLD, 0.0).sum(1, keepdim=True) / MASK.sum(1, keepdim=True)
    ratio = (mean + new - NEW).exp()
    return torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * ratio.clamp(0.9, 1.1))


def kl_plus_frozen(new):
    return 0.5 * (new - REF) ** 2  # the + forms differ from k2 by a constant


def in_case(**update):
    return lambda new: loss_of(new, OLD, ADVANTAGES, MASK, **update).per_token


CASES = {
    "clip": (in_case(kind="clip", eps_low=0.1, eps_high=0.1), None),
    "dual clip": (in_case(kind="clip", eps_low=0.1, eps_high=0.1, dual_clip=1.05), None),
    "cpi": (in_case(kind="cpi"), None),
    "trpo": (in_case(kind="trpo"), lambda n: -ADVANTAGES * (n - OLD).exp()),
    "penalty": (
        in_case(kind="penalty", coef=0.7),
        lambda n: -ADVANTAGES * (n - OLD).exp() + 0.7 * ((n - OLD).exp() - 1 - (n - OLD)),
    ),
    "reinforce": (in_case(kind="reinforce"), None),
    "gspo": (in_case(kind="gspo", eps_low=0.1, eps_high=0.1), gspo_frozen),
    "cispo": (
        in_case(kind="cispo", eps_low=0.1, eps_high=0.1),
        lambda n: -FROZEN.clamp(0.9, 1.1) * ADVANTAGES * n,
    ),
    "dppo": (in_case(kind="dppo", max_divergence=0.05), None),
    "dppo by kl": (in_case(kind="dppo", divergence="kl", max_divergence=0.01), None),
    "k1": (lambda n: estimate_kl("k1", n, REF, MASK), None),
    "k2": (lambda n: estimate_kl("k2", n, REF, MASK), None),
    "k3": (lambda n: estimate_kl("k3", n, REF, MASK), None),
    "abs": (lambda n: estimate_kl("abs", n, REF, MASK), None),
    "k1+": (lambda n: estimate_kl("k1+", n, REF, MASK), kl_plus_frozen),
    "k3+": (lambda n: estimate_kl("k3+", n, REF, MASK), kl_plus_frozen),
    "k3 by ratio": (
        lambda n: estimate_kl("k3", n, REF, MASK) * log_ratio(n, OLD).exp(),
        None,
    ),
}


@table("name", CASES)
def test_gradients_agree_with_central_differences(name):
    """Trap 21: losses with stop-gradient parts are differenced with those parts frozen."""
    function, frozen = CASES[name]
    reference = frozen or function
    new = NEW.clone().requires_grad_()
    torch.where(MASK, function(new), 0.0).sum().backward()
    step, slow = 1e-6, torch.zeros_like(NEW)
    for i, j in MASK.nonzero().tolist():
        for sign in (1, -1):
            moved = NEW.clone()
            moved[i, j] += sign * step
            slow[i, j] += sign * float(torch.where(MASK, reference(moved), 0.0).sum()) / (2 * step)
    torch.testing.assert_close(new.grad, slow, atol=1e-7, rtol=1e-6)


def test_estimators_have_the_values_of_the_worked_example():
    old, ref = one(-0.12), one(-0.15)
    values = {n: float(estimate_kl(n, old, ref, ONE_CELL)) for n in ("k1", "abs", "k2", "k3")}
    assert values == pytest.approx({"k1": 0.03, "abs": 0.03, "k2": 0.00045, "k3": 0.00044553355})
    assert float(estimate_kl("k1+", old, ref, ONE_CELL)) == pytest.approx(0.03)
    assert float(estimate_kl("k3+", old, ref, ONE_CELL)) == pytest.approx(0.00044553355)


def test_full_kl_is_the_sum_over_the_vocabulary_and_survives_zeros():
    p, q = torch.tensor([0.8, 0.2, 0.0]).double(), torch.tensor([0.7, 0.3, 0.0]).double()
    assert float(full_kl(p.log(), q.log())) == pytest.approx(0.025732, abs=1e-6)


def test_a_token_without_probability_sends_no_nan_back():
    """d KL / d logit_i of p = softmax is p_i (log p_i - log q_i - KL): 0 where p_i is 0."""
    logits = torch.tensor([0.8, 0.2, 0.0], dtype=torch.float64).log().requires_grad_()
    other = torch.tensor([0.7, 0.3, 0.0], dtype=torch.float64).log().requires_grad_()
    kl = full_kl(torch.log_softmax(logits, -1), torch.log_softmax(other, -1))
    by_p, by_q = torch.autograd.grad(kl, [logits, other])
    logs, mean = [math.log(0.8 / 0.7), math.log(0.2 / 0.3)], 0.0257318
    expected = [0.8 * (logs[0] - mean), 0.2 * (logs[1] - mean), 0.0]
    assert by_p.tolist() == pytest.approx(expected, abs=1e-6)
    assert by_q.tolist() == pytest.approx([0.7 - 0.8, 0.3 - 0.2, 0.0], abs=1e-12)


def test_the_gradient_of_plain_k2_is_the_kls_on_policy_and_only_near_it_after_a_step():
    """Exact means over five arms of q grad log pi, sampled from the policy itself and from the old
    one, from which no ratio has moved by more than a fifth."""
    generator = torch.Generator().manual_seed(0)

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(5, generator=generator).double()

    gaps = []
    while len(gaps) < 300:
        reference = noise(1.0)
        old = torch.softmax(reference + noise(0.5), 0)
        logits = (old.log() + noise(0.15)).requires_grad_()
        if ((torch.softmax(logits.detach(), 0) / old - 1).abs() > 0.2).any():
            continue
        log_probs, ref = torch.log_softmax(logits, 0), torch.log_softmax(reference, 0)
        per_arm = estimate_kl("k2", log_probs, ref, torch.ones(5, dtype=torch.bool))
        new = log_probs.detach().exp()
        p, q = new.tolist(), ref.exp().tolist()
        logs = [math.log(a / b) for a, b in zip(p, q, strict=True)]
        kl = sum(a * b for a, b in zip(p, logs, strict=True))
        slopes = [a * (b - kl) for a, b in zip(p, logs, strict=True)]
        true = torch.tensor(slopes, dtype=torch.float64)
        for weights, exact in ((new, True), (old, False)):
            [found] = torch.autograd.grad((weights * per_arm).sum(), logits, retain_graph=True)
            gap = float((found - true).norm() / true.norm())
            assert gap < 1e-9 or not exact
        gaps.append(gap)
    assert 0.03 < statistics.median(gaps) < 0.1
