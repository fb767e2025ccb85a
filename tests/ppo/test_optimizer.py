import pytest
import torch
from helpers import table

from tether.ppo.optimizer import Optimizer, schedule_factor


@table(
    ("schedule", "factors"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("cosine", [1, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_learning_rates_fall_as_their_schedule_says(schedule, factors):
    found = [schedule_factor(schedule, i, 4) for i in range(4)]
    assert found == pytest.approx(factors)


def stepped(gradient: list[float], max_grad_norm: float = 1.0, factor: float = 1.0):
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = Optimizer([weight], lr=0.1, max_grad_norm=max_grad_norm)
    optimizer.set_factor(factor)
    weight.grad = torch.tensor(gradient, dtype=torch.float64)
    return optimizer.step(), weight, optimizer


def test_a_gradient_is_scaled_to_the_largest_norm_allowed_and_its_own_norm_returned():
    """3, 4 has norm 5; scaled it is 0.6, 0.8, of which Adam's first moment keeps a tenth."""
    norm, weight, optimizer = stepped([3.0, 4.0])
    assert float(norm) == pytest.approx(5.0)
    assert optimizer.adam.state[weight]["exp_avg"].tolist() == pytest.approx([0.06, 0.08], rel=1e-5)


def test_a_small_gradient_is_not_scaled():
    _, weight, optimizer = stepped([0.3, 0.4], max_grad_norm=1.0)
    assert optimizer.adam.state[weight]["exp_avg"].tolist() == pytest.approx([0.03, 0.04])


@table("factor", [1.0, 0.25])
def test_adams_first_step_is_the_learning_rate_downhill(factor):
    _, weight, _ = stepped([3.0, -4.0], factor=factor)
    assert weight.tolist() == pytest.approx([-0.1 * factor, 0.1 * factor], rel=1e-6)


def test_a_step_clears_its_gradients():
    assert stepped([1.0, 1.0])[1].grad is None
    assert stepped([float("nan"), 1.0])[1].grad is None
