import math

import pytest
import torch
from helpers import f64, grids, numbers, table
from hypothesis import given
from hypothesis import strategies as st

from tether.algo.losses import LossInputs, clip_value_loss, policy_loss
from tether.config import ClipUpdate


def clip_loss(new, old, advantages, eps_low=0.2, eps_high=0.2):
    everywhere = torch.ones_like(new, dtype=torch.bool)
    update = ClipUpdate(eps_low=eps_low, eps_high=eps_high)
    return policy_loss(update, LossInputs(new, old, advantages, everywhere))


def one_cell(ratio: float, advantage: float, eps_low=0.2, eps_high=0.2):
    """Loss, gradient with respect to the new log-prob, and whether the clip was active."""
    new = f64([[math.log(0.3 * ratio)]]).requires_grad_()
    loss = clip_loss(new, f64([[math.log(0.3)]]), f64([[advantage]]), eps_low, eps_high)
    [gradient] = torch.autograd.grad(loss.per_token.sum(), new)
    return float(loss.per_token.detach()), float(gradient), loss.clipped.item()


def test_a_gain_beyond_the_clip_is_flat():
    """pi_old 0.3, pi_new 0.6, A 1: loss -1.2 and no gradient."""
    assert one_cell(2.0, 1.0) == (pytest.approx(-1.2), 0.0, True)


def test_a_loss_is_never_clipped_away_for_a_positive_advantage():
    assert one_cell(0.5, 1.0) == (pytest.approx(-0.5), pytest.approx(-0.5), False)


def test_with_a_negative_advantage_a_fallen_ratio_is_flat():
    """Trap 19: at ratio 0.5 the objective is min(-0.5, -0.8) = -0.8."""
    assert one_cell(0.5, -1.0) == (pytest.approx(0.8), 0.0, True)


@table("ratio", [1.5, 10.0, 1000.0])
def test_with_a_negative_advantage_a_grown_ratio_is_punished_without_bound(ratio):
    """Trap 19: at ratio 1.5 the objective is -1.5, not -1.2."""
    assert one_cell(ratio, -1.0) == (pytest.approx(ratio), pytest.approx(ratio), False)


@given(st.floats(0.01, 5), numbers, st.floats(0.05, 1), st.floats(0.05, 2))
def test_the_loss_is_minus_the_smaller_objective(ratio, advantage, eps_low, eps_high):
    """Trap 19, and the two epsilons each on their own side."""
    held = min(max(ratio, 1 - eps_low), 1 + eps_high)
    loss, _, clipped = one_cell(ratio, advantage, eps_low, eps_high)
    assert loss == pytest.approx(-min(ratio * advantage, held * advantage), abs=1e-9)
    gained = held * advantage < ratio * advantage - 1e-9
    assert clipped or not gained


def test_only_cells_that_lost_their_gradient_count_as_clipped():
    ratios = [[1.3, 1.3, 0.7, 0.7, 1.3, 1.0]]
    advantages = [[1.0, -1.0, 1.0, -1.0, 0.0, 1.0]]
    loss = clip_loss(f64(ratios).log(), torch.zeros(1, 6).double(), f64(advantages), 0.2, 0.2)
    assert loss.clipped_high.tolist() == [[True, False, False, False, False, False]]
    assert loss.clipped_low.tolist() == [[False, False, False, True, False, False]]
    assert loss.ratio[0].tolist() == pytest.approx(ratios[0])


def test_with_ratio_one_the_objective_is_the_mean_advantage():
    """The documents' illustrative advantages: L^CPI = 0.073333, and clipping changes nothing."""
    advantages = f64([[0.13, 0.10, 0.08, 0.05, 0.03, 0.05]])
    same = torch.zeros_like(advantages)
    loss = clip_loss(same, same, advantages)
    assert -float(loss.per_token.mean()) == pytest.approx(0.073333, abs=1e-6)


def test_a_log_ratio_of_a_thousand_stays_finite():
    loss = clip_loss(f64([[1000.0]]), f64([[0.0]]), f64([[-1.0]]), 0.2, 0.2)
    assert float(loss.per_token) == pytest.approx(math.exp(20))


def central_difference(function, x: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    slope = torch.zeros_like(x)
    for cell in range(x.numel()):
        moved = torch.zeros_like(x).flatten()
        moved[cell] = step
        up, down = function(x + moved.view_as(x)), function(x - moved.view_as(x))
        slope.view(-1)[cell] = (up - down) / (2 * step)
    return slope


@given(grids(numbers, numbers, numbers))
def test_the_policy_gradient_is_the_finite_difference(cells):
    new, old, advantages = map(f64, cells)
    kinks = (new - old)[..., None] - torch.tensor([math.log(0.8), math.log(1.3)])
    advantages = torch.where((kinks.abs() < 1e-4).any(dim=-1), 0.0, advantages)

    def total(x):
        return clip_loss(x, old, advantages, 0.2, 0.3).per_token.sum()

    [gradient] = torch.autograd.grad(total(new.requires_grad_()), new)
    with torch.no_grad():
        torch.testing.assert_close(gradient, central_difference(total, new), rtol=1e-5, atol=1e-5)


@given(grids(numbers, numbers, numbers))
def test_the_value_gradient_is_the_finite_difference(cells):
    new, old, returns = map(f64, cells)
    near_kink = ((new - old).abs() - 0.2).abs() < 1e-4
    held = old + (new - old).clamp(-0.2, 0.2)
    near_tie = ((new - returns) ** 2 - (held - returns) ** 2).abs() < 1e-4
    outside = (new - old).abs() > 0.2
    new = torch.where(near_kink | (near_tie & outside), old, new)

    def total(x):
        return clip_value_loss(x, old, returns, 0.2).per_token.sum()

    [gradient] = torch.autograd.grad(total(new.requires_grad_()), new)
    with torch.no_grad():
        torch.testing.assert_close(gradient, central_difference(total, new), rtol=1e-5, atol=1e-5)


@table(
    ("new", "loss", "slope", "clipped"),
    [
        (0.1, 0.405, -0.9, False),  # inside the clip: half of (0.1 - 1)^2
        (0.5, 0.32, 0.0, True),  # moved towards the return beyond 0.2: held at 0.2, flat
        (-0.5, 1.125, -1.5, False),  # moved away: its own, larger error
    ],
)
def test_value_loss_by_hand_with_old_value_zero_and_return_one(new, loss, slope, clipped):
    value = f64([[new]]).requires_grad_()
    found = clip_value_loss(value, f64([[0.0]]), f64([[1.0]]), 0.2)
    [gradient] = torch.autograd.grad(found.per_token.sum(), value)
    assert float(found.per_token.detach()) == pytest.approx(loss)
    assert float(gradient) == pytest.approx(slope)
    assert bool(found.clipped) is clipped
