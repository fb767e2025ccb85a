import pytest
import torch
from helpers import table

from tether.ppo.optimizer import Optimizer, schedule_factor, warmup_factor
from tether.train.ppo import _set_learning_rates


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


@table(
    ("warmup_iterations", "factors"),
    [
        (0, [1, 1, 1, 1]),
        (1, [1, 1, 1, 1]),
        (3, [1 / 3, 2 / 3, 1, 1]),
        (8, [0.125, 0.25, 0.375, 0.5]),
    ],
)
def test_a_warm_up_rises_to_one_in_its_last_iteration(warmup_iterations, factors):
    assert [warmup_factor(i, warmup_iterations) for i in range(4)] == pytest.approx(factors)


def test_betas_eps_and_weight_decay_enter_adam_as_in_its_formula():
    """Two steps of AdamW on one weight by hand: decay first, then the step of both moments."""
    lr, b1, b2, eps, decay = 0.1, 0.8, 0.9, 0.5, 0.25
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = Optimizer([weight], lr, 1e9, weight_decay=decay, betas=(b1, b2), eps=eps)
    x, m, v = 2.0, 0.0, 0.0
    for step, gradient in enumerate([3.0, -1.0], start=1):
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        x -= lr * decay * x
        x -= lr * (m / (1 - b1**step)) / ((v / (1 - b2**step)) ** 0.5 + eps)
        assert weight.item() == pytest.approx(x, rel=1e-12)


def test_a_run_multiplies_schedule_and_warm_up_and_the_actors_waits_for_its_first_update(build):
    """4 iterations, linear: 1, 3/4, 1/2, 1/4. The actor begins to learn in iteration 1."""
    roles, config = build(
        actor__lr=0.8,
        actor__schedule="linear",
        actor__lr_warmup_iterations=2,
        actor__betas=[0.7, 0.8],
        critic__lr=0.4,
        critic__lr_warmup_iterations=4,
        critic__warmup_iterations=1,
        critic__eps=1e-3,
        train__iterations=4,
    )
    found = {"actor": [], "critic": []}
    for iteration in range(4):
        _set_learning_rates(iteration, config, roles)
        for role, optimizer in (
            ("actor", roles.actor_optimizer),
            ("critic", roles.critic_optimizer),
        ):
            found[role].append(optimizer.adam.param_groups[0]["lr"])
    assert found["actor"] == pytest.approx([0.8 * x for x in (1 / 2, 3 / 8, 1 / 2, 1 / 4)])
    assert found["critic"] == pytest.approx([0.4 * x for x in (1 / 4, 3 / 8, 3 / 8, 1 / 4)])
    adam = [o.adam.param_groups[0] for o in (roles.actor_optimizer, roles.critic_optimizer)]
    assert [(g["betas"], g["eps"]) for g in adam] == [((0.7, 0.8), 1e-8), ((0.7, 0.8), 1e-3)]
