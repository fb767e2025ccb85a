"""Numbers that other projects publish in their tests, and tether's functions on the same tensors.

The numbers are theirs, with where they stand; no line of their code is here. Where a published test
states a formula or an inequality in place of a number, the number was worked out by hand. Tests
whose name says "on purpose" are about a published number that tether does not give, and why.
"""

import itertools
import math
import statistics

import pytest
import torch
from helpers import f64, table

from tether.algo.advantages import (
    AdvantageInputs,
    WeightedReward,
    critic_returns,
    distillation,
    estimate_advantages,
    gae,
    gdpo,
    grpo,
    minus_group_mean,
    overlong_penalty,
    place_scores,
    policy_lambda,
    reward_to_go,
    rloo,
    shape_rewards,
    zero_spread,
)
from tether.algo.importance import correction_weights, mismatch
from tether.algo.kl import adaptive_beta, estimate_kl, k1, k3
from tether.algo.losses import (
    LossInputs,
    PolicyLoss,
    clip_value_loss,
    log_ratio,
    policy_loss,
    squared_value_loss,
)
from tether.algo.masked import cell_weights, masked_mean, masked_moments, weighted_sum, whiten
from tether.algo.pass_at_k import best_of_k, majority_of_k
from tether.config import ActorSection, AdvantageSection

# Every source below is one of these files, at this commit.
SOURCES = {
    "sb3": "DLR-RM/stable-baselines3 e05d2db tests/test_gae.py",
    "torchtune rewards": "pytorch/torchtune bd2a0fc tests/torchtune/rlhf/test_rewards.py",
    "torchtune loss": "pytorch/torchtune bd2a0fc tests/torchtune/rlhf/loss/test_ppo_loss.py",
    "skyrl utils": "NovaSky-AI/SkyRL a956457 tests/backends/skyrl_train/utils/test_ppo_utils.py",
    "skyrl losses": "NovaSky-AI/SkyRL a956457 tests/train/algorithms/test_losses.py",
    "skyrl correction": "NovaSky-AI/SkyRL a956457 tests/train/algorithms/"
    "test_off_policy_correction.py",
    "nemo ppo": "NVIDIA-NeMo/RL 7ea279a tests/unit/algorithms/test_ppo.py",
    "nemo grpo": "NVIDIA-NeMo/RL 7ea279a tests/unit/algorithms/test_grpo.py",
    "nemo utils": "NVIDIA-NeMo/RL 7ea279a tests/unit/algorithms/test_utils.py",
    "nemo losses": "NVIDIA-NeMo/RL 7ea279a tests/unit/algorithms/test_loss_functions.py",
    "nemo estimators": "NVIDIA-NeMo/RL 7ea279a tests/unit/algorithms/test_advantage_estimator.py",
    "nemo rewards": "NVIDIA-NeMo/RL 7ea279a tests/unit/algorithms/test_reward_functions.py",
    "nemo eval": "NVIDIA-NeMo/RL 0a18322 tests/unit/evals/test_eval.py",
    "eureka": "microsoft/eureka-ml-insights 262dd1b tests/metric_utils_tests/live_code_bench/"
    "pass_at_k_estimator_tests.py",
    "trl rewards": "huggingface/trl f2cd577 tests/test_rewards.py",
    "openrlhf": "OpenRLHF/OpenRLHF 3c3be62 tests/test_loss_aggregation.py",
    "slime policy": "THUDM/slime 624b824 tests/test_policy_loss.py",
    "slime cispo": "THUDM/slime 624b824 tests/test_cispo_loss.py",
    "slime kl": "THUDM/slime 624b824 tests/test_ppo_kl_metric.py",
    "slime whiten": "THUDM/slime 624b824 tests/test_advantage_whiten_cp.py",
    "verl algos": "volcengine/verl b178a3c tests/trainer/ppo/test_core_algos_on_cpu.py",
    "verl functional": "volcengine/verl b178a3c tests/utils/test_torch_functional.py",
    "trlx": "CarperAI/trlx 3340c2f tests/test_utils.py",
}


def ones(rows: list) -> torch.Tensor:
    return torch.ones_like(f64(rows), dtype=torch.bool)


def mask_of(rows: list) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def close(found: torch.Tensor, expected: object, within: float = 1e-9) -> None:
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=within)


def whitened(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return whiten(x, mask, masked_moments(x, mask))


def loss_of(new, old, advantages, mask=None, **update) -> PolicyLoss:
    new, old, advantages = f64(new), f64(old), f64(advantages)
    mask = ones(new.tolist()) if mask is None else mask_of(mask)
    return policy_loss(ActorSection(update=update).update, LossInputs(new, old, advantages, mask))


# --- generalised advantage estimation ---------------------------------------------------------


def one_reward_at_the_end(gamma: float, lam: float, value: float, steps: int = 64) -> list[float]:
    """In closed form: a critic of one constant value, a reward of 1 on the last step."""
    q = gamma * lam
    last = 1 - value
    return [
        q**k * last + (gamma - 1) * value * sum(q**j for j in range(k))
        for k in reversed(range(steps))
    ]


SB3_ENVIRONMENT = [
    ("sb3 test_gae_computation", gamma, lam, value, episodes)
    for gamma in (1.0, 0.99)
    for lam in (1.0, 0.9)
    for value in (0.0, 1.0)
    for episodes in (1, 3)
]


@table(("source", "gamma", "lam", "value", "episodes"), SB3_ENVIRONMENT)
def test_gae_in_the_environment_of_one_reward_after_64_steps(source, gamma, lam, value, episodes):
    """Episodes that follow each other in theirs are rows in ours."""
    rewards = f64([[0.0] * 63 + [1.0]] * episodes)
    values = torch.full_like(rewards, value)
    found = gae(rewards, values, torch.zeros(episodes).double(), rewards >= 0, gamma, lam)
    close(found, [one_reward_at_the_end(gamma, lam, value)] * episodes)


SB3_HORIZON = [
    # A reward of 1 on every step is worth 1 / (1 - 0.98) = 50; cut off after 8 steps, a critic
    # that knows so is right where the value after the last step counts,
    ("sb3 test_infinite_horizon, timeouts handled", 50.0, [0.0] * 8),
    # and 49 too high on the last step where it does not.
    ("sb3 test_infinite_horizon, timeouts ignored", 0.0, [-49 * 0.98**k for k in range(7, -1, -1)]),
]


@table(("source", "final", "expected"), SB3_HORIZON)
def test_gae_where_an_endless_task_is_cut_off(source, final, expected):
    rewards = f64([[1.0] * 8])
    found = gae(rewards, 50 * rewards, f64([final]), rewards > 0, gamma=0.98, lam=1.0)
    close(found, [expected])


RETURNS = [
    # rewards, values, gamma, lambda, returns
    (
        "torchtune rewards test_estimate_returns",
        [[0.0, 0, 0, 1]],
        [[0.0, 0, 0, 1]],
        0.9,
        0.95,
        [[0.9**3 * 0.95**2, 0.9**2 * 0.95, 0.9, 1.0]],
    ),
    (
        "skyrl utils test_compute_gae_advantage_return",
        [[1.0, 2, 3]],
        [[0.5, 1, 1.5]],
        1.0,
        1.0,
        [[6.0, 5, 3]],
    ),
    (
        "skyrl utils test_compute_gae_advantage_return_gamma",
        [[1.0, 2, 3]],
        [[0.5, 1, 1.5]],
        0.5,
        1.0,
        [[2.75, 3.5, 3]],
    ),
    (
        "skyrl utils test_compute_gae_advantage_return_lam",
        [[1.0, 2, 3]],
        [[0.5, 1, 1.5]],
        1.0,
        0.5,
        [[3.625, 4.25, 3]],
    ),
    (
        "nemo ppo test_gae_basic_computation",
        [[0.0, 0, 0, 1]],
        [[0.5, 0.5, 0.5, 0.5]],
        1.0,
        1.0,
        [[1.0, 1, 1, 1]],
    ),
    (
        "nemo ppo test_gae_gamma_lambda_zero",  # advantages 1, 1, 2
        [[0.0, 0, 5]],
        [[1.0, 2, 3]],
        1.0,
        0.0,
        [[2.0, 3, 5]],
    ),
]


@table(("source", "rewards", "values", "gamma", "lam", "returns"), RETURNS)
def test_returns_of_gae(source, rewards, values, gamma, lam, returns):
    rewards, values = f64(rewards), f64(values)
    nothing_after = torch.zeros(len(rewards)).double()
    close(gae(rewards, values, nothing_after, ones(rewards.tolist()), gamma, lam) + values, returns)


def test_gae_with_one_lambda_for_the_policy_and_one_for_the_critic():
    """nemo ppo test_gae_vapo_decoupled_lambda: lambda 0.5 and 1, rewards 1 and 2 at the end of four
    tokens. Its values are random; by lambda 1 the returns are the rewards whatever they are, and
    differ from advantages + values, which is what it asserts."""
    mask = mask_of([[1] * 4] * 2)
    section = AdvantageSection(lam=0.5)
    for values in (f64([[0.3, -1.2, 0.8, 2.0], [-0.7, 0.1, 1.5, -0.4]]), f64([[0.0] * 4] * 2)):
        rewards, nothing = place_scores(f64([1.0, 2.0]), mask), f64([0.0, 0.0])
        inputs = AdvantageInputs(rewards, values, nothing, nothing, nothing, mask, samples=1)
        advantages = estimate_advantages(section, inputs)
        returns = critic_returns(section, inputs, advantages, lam=1.0)
        close(returns, [[1.0] * 4, [2.0] * 4])
        assert not torch.allclose(returns, advantages + values, atol=1e-5)


LAMBDAS = [
    # alpha, sampled tokens, lambda: 1 - 1/(0.05 x 3) and 1 - 1/(0.05 x 8) are held at 0
    ("nemo ppo test_gae_length_adaptive_lambda, short", 0.05, 3, 0.0),
    ("nemo ppo test_gae_length_adaptive_lambda, long", 0.05, 8, 0.0),
]


@table(("source", "alpha", "tokens", "expected"), LAMBDAS)
def test_lambdas_by_length(source, alpha, tokens, expected):
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, :tokens] = True
    close(policy_lambda(AdvantageSection(lam_alpha=alpha), mask, torch.float64), [expected])


GAPS = [
    # The value on the masked cell, of the placeholder's size and of two others: nobody sees it.
    ("nemo ppo test_gae_carry_forward_interior_gap", 999.0),
    ("verl algos test_multi_turn_compute_gae_advantage_return, values1", -100.0),
    ("verl algos test_multi_turn_compute_gae_advantage_return, values2", 0.5),
]


@table(("source", "placeholder"), GAPS)
def test_gae_does_not_see_a_masked_column(source, placeholder):
    """gamma 0.99, lambda 0.95, values 0.1, 0.2, 0.4, 0.5 and a reward of 1 at the end, by hand."""
    mask = mask_of([[1, 1, 0, 1, 1]])
    values = f64([[0.1, 0.2, placeholder, 0.4, 0.5]])
    rewards = place_scores(f64([1.0]), mask)
    d4 = 1 - 0.5
    d3 = 0.99 * 0.5 - 0.4
    d1 = 0.99 * 0.4 - 0.2
    d0 = 0.99 * 0.2 - 0.1
    a3 = d3 + 0.9405 * d4
    a1 = d1 + 0.9405 * a3
    found = gae(rewards, values, f64([0.0]), mask, gamma=0.99, lam=0.95)
    close(found, [[d0 + 0.9405 * a1, a1, 0.0, a3, d4]])


def test_a_masked_column_has_no_reward_on_purpose_where_skyrl_and_torchtune_count_it():
    """SkyRL's loop runs over the masked column and only leaves it out of the moments (returns 6, 5,
    3; advantages 0.7071, 0.1768, -0.7071). A column that the policy did not sample is a tool's
    output or padding: here neither its reward nor its value reaches the tokens around it.
    (skyrl utils test_compute_gae_advantage_return_with_masking; torchtune rewards
    test_estimate_advantages_with_masks has the score itself on the masked cell)"""
    rewards, values = f64([[1.0, 2, 3]]), f64([[0.5, 1, 1.5]])
    theirs = gae(rewards, values, f64([0.0]), mask_of([[1, 1, 1]]), 1.0, 1.0)
    close(theirs + values, [[6.0, 5, 3]])
    moments = masked_moments(theirs, mask_of([[1, 0, 1]]))
    shown = whiten(theirs, mask_of([[1, 1, 1]]), moments)
    close(shown, [[0.7071, 0.1768, -0.7071]], within=1e-4)

    ours = gae(rewards, values, f64([0.0]), mask_of([[1, 0, 1]]), 1.0, 1.0)
    close(ours, [[1 + 3 - 0.5, 0, 3 - 1.5]])
    without = gae(f64([[1.0, 3]]), f64([[0.5, 1.5]]), f64([0.0]), mask_of([[1, 1]]), 1.0, 1.0)
    close(ours[:, [0, 2]], without.tolist())

    padded = gae(f64([[0.0, 0, 0, 1]]), f64([[0.0, 0, 0, 1]]), f64([0.0]), mask_of([[1, 1, 1, 0]]),
                 0.9, 0.95)  # fmt: skip
    close(padded, [[0.0, 0, 0, 0]])


SHAPED = [
    (
        "torchtune rewards test_get_rewards_ppo",
        0.5,
        [1.0, 2, 3],
        [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.6, 0.7, 0.8]],
        [[0.2, 0.3, 0.4], [0.6, 0.7, 0.8], [0.9, 1.0, 1.1]],
        [[-0.1] * 3, [-0.2] * 3, [-0.3] * 3],
        [[0.05, 0.05, 1.05], [0.1, 0.1, 2.1], [0.15, 0.15, 3.15]],
    ),
    (
        "nemo ppo test_gae_kl_penalty_in_rewards, reference alike",
        0.1,
        [1.0],
        [[-1.0, -2.0, -1.5]],
        [[-1.0, -2.0, -1.5]],
        [[0.0, 0, 0]],
        [[0.0, 0, 1]],
    ),
    (
        "nemo ppo test_gae_kl_penalty_in_rewards, reference two nats away",
        0.1,
        [1.0],
        [[-1.0, -2.0, -1.5]],
        [[-3.0, -4.0, -3.5]],
        [[2.0, 2, 2]],
        [[-0.2, -0.2, 0.8]],
    ),
]


@table(("source", "beta", "scores", "log_probs", "ref", "kl", "rewards"), SHAPED)
def test_rewards_with_the_kl_in_them(source, beta, scores, log_probs, ref, kl, rewards):
    mask = ones(log_probs)
    estimate = k1(f64(log_probs), f64(ref), mask)
    close(estimate, kl)
    close(shape_rewards(place_scores(f64(scores), mask), estimate, beta), rewards)


# --- means, moments, whitening ----------------------------------------------------------------

MEANS = [
    ("torchtune rewards test_masked_single_batch_mean", [1.0, 2, 3, 4, 5], [1, 1, 1, 0, 0], 2.0),
    ("torchtune rewards test_masked_multi_batch_mean", [2.0, 3, 4, 5, 6], [0, 0, 1, 1, 1], 5.0),
    ("verl functional test_masked_mean", [1.0, 2, 3, 4], [1, 0, 0, 1], 2.5),
    ("verl functional test_masked_mean, NaN masked", [1.0, 2, math.nan, 4], [1, 0, 0, 1], 2.5),
    ("nemo losses test_masked_mean_all_zeros", [1.0, 2, 3, 4], [0, 0, 0, 0], 0.0),
    ("nemo losses test_masked_mean_all_zeros, one", [1.0, 2, 3, 4], [1, 0, 0, 0], 1.0),
]


@table(("source", "x", "mask", "expected"), MEANS)
def test_masked_means(source, x, mask, expected):
    close(masked_mean(f64(x), mask_of(mask)), expected)


def test_a_nan_that_counts_is_seen():
    """verl functional test_masked_mean, third row"""
    assert masked_mean(f64([1.0, 2, math.nan, 4]), mask_of([1, 0, 1, 0])).isnan()


VARIANCES = [
    ("torchtune rewards test_masked_var", [1.0, 2, 3, 4, 5], [1, 1, 1, 0, 0], 1.0),
    ("trlx test_running_moments, a1", list(map(float, range(100))), [1] * 100, 101 * 100 / 12),
    ("trlx test_running_moments, a2", [1.0] * 100, [1] * 100, 0.0),
    ("trlx test_running_moments, a4", [-10.0, -1, 0, 1, 10], [1] * 5, 202 / 4),
]


@table(("source", "x", "mask", "expected"), VARIANCES)
def test_variances_are_unbiased(source, x, mask, expected):
    close(masked_moments(f64(x), mask_of(mask)).variance, expected)


def test_whitening_counts_tokens_and_not_rows():
    """slime whiten test_whitened_advantages_are_cp_invariant: eight rows of these lengths, each
    with its reward on every token, by a loop over all of them."""
    lengths = [48, 90, 12, 16, 30, 84, 20, 96]
    rewards = [1.5, -0.5, -1.0, 2.0, 0.25, -1.75, 0.75, -0.25]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    x = torch.where(mask, f64(rewards)[:, None], 0.0)
    tokens = [r for r, n in zip(rewards, lengths, strict=True) for _ in range(n)]
    mean, spread = statistics.fmean(tokens), statistics.stdev(tokens)
    close(whitened(x, mask)[:, 0], [(r - mean) / spread for r in rewards], within=1e-7)


def test_whitening_takes_the_mean_away_on_purpose_where_torchtune_adds_it_back():
    """torchtune rewards test_estimate_advantages_with_whitening: its `shift_mean=True` adds the
    mean again, so that its advantages are scaled and not centred. The difference is that mean."""
    advantages = [0.9**3 * 0.95**2, 0.9**2 * 0.95, 0.9, 0.0]
    mean, spread = statistics.fmean(advantages), statistics.stdev(advantages)
    theirs = [(a - mean) / spread + mean for a in advantages]
    found = whitened(f64([advantages]), mask_of([[1, 1, 1, 1]]))
    close(found, [[t - mean for t in theirs]], within=1e-7)
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-12)


# --- KL ---------------------------------------------------------------------------------------

SKYRL_KL = ([[0.2, 0.3, 0.5]], [[0.1, 0.2, 0.4]], [[1, 1, 0]])
SKYRL_NAN = ([[0.2, 0.3, 0.5, 0.7]], [[0.1, 0.2, 0.4, math.nan]], [[1, 1, 1, 0]])
FAR = ([[-1.0, -1, -1]], [[0.0, -15, -30]], [[1, 1, 1]])
K3_OF_A_TENTH = math.exp(-0.1) - 1 + 0.1
KLS = [
    # estimator, log-probs, reference, mask, expected
    ("skyrl utils test_compute_approx_kl, k1", "k1", *SKYRL_KL, [[0.1, 0.1, 0]]),
    ("skyrl utils test_compute_approx_kl, abs", "abs", *SKYRL_KL, [[0.1, 0.1, 0]]),
    ("skyrl utils test_compute_approx_kl, k2", "k2", *SKYRL_KL, [[0.005, 0.005, 0]]),
    ("skyrl utils test_compute_approx_kl, k3", "k3", *SKYRL_KL, [[K3_OF_A_TENTH] * 2 + [0]]),
    (
        "skyrl utils test_compute_approx_kl_applies_loss_mask, k1",
        *("k1", *SKYRL_NAN, [[0.1, 0.1, 0.1, 0]]),
    ),
    (
        "skyrl utils test_compute_approx_kl_applies_loss_mask, k3",
        *("k3", *SKYRL_NAN, [[K3_OF_A_TENTH] * 3 + [0]]),
    ),
    ("nemo losses test_calculate_kl, k1", "k1", *FAR, [[-1.0, 14, 29]]),
    ("nemo losses test_calculate_kl, k2", "k2", *FAR, [[0.5, 98, 420.5]]),
    (
        "nemo losses test_clipped_pg_loss_kl_penalty",
        *("k3", [[0.0, -1, -2]], [[-1.0, -1, -1]], [[1, 1, 1]]),
        [[0.36788, 0.0, 0.71828]],
    ),
    (
        "nemo losses test_clipped_pg_loss_on_policy_kl_importance_sampling",
        *("k3", [[-1.69315, -1.0, -0.59453]], [[-1.0, -1, -1]], [[1, 1, 1]]),
        [[0.3069, 0.0, 0.0721]],
    ),
    (
        "slime kl test_ppo_estimator_does_not_corrupt_logged_kl",
        *("k1", [[0.5, 0.7, 0.9]], [[0.4, 0.5, 0.6]], [[1, 1, 1]]),
        [[0.1, 0.2, 0.3]],
    ),
]


@table(("source", "name", "log_probs", "ref", "mask", "expected"), KLS)
def test_kl_estimates(source, name, log_probs, ref, mask, expected):
    found = estimate_kl(name, f64(log_probs), f64(ref), mask_of(mask))
    close(found, expected, within=1e-4)


def test_k3_holds_its_input_within_20_on_purpose_and_never_its_output():
    """nemo losses test_calculate_kl: k3 of q = 1 - 15 and 1 - 30 is published as 13 and 28 without
    a clamp, and as 10 and 10 with its output clamped. e^20 is finite in every float type, and at 20
    nats the policy is lost anyway; a clamp of the output would cut off the mean's own tail, a bias,
    and take the gradient of all that lies above it."""
    found = k3(f64(FAR[0]), f64(FAR[1]), mask_of(FAR[2]))
    close(found, [[0.71828, 13.0, 19.0]], within=1e-4)  # 19 = 20 - 1, and not 28
    assert estimate_kl("k2", f64(FAR[0]), f64(FAR[1]), mask_of(FAR[2]))[0, 2] == 420.5


KL_GRADIENTS = [
    # The gradient of ratio x k3 by the log-prob is k3 + 1 - e^(-q) = q; log-probs, reference.
    (
        "nemo losses test_calculate_kl_detaches_importance_sampling_when_input_clamped",
        [[-1.0]],
        [[0.0]],
        1.0,
        [[-1.0]],
    ),
    (
        "nemo losses test_clipped_pg_loss_kl_gradient_includes_sampling_term",
        [[-1.2, -0.7]],
        [[-0.9, -1.1]],
        0.3,
        [[-0.045, 0.06]],
    ),
]


@table(("source", "log_probs", "ref", "beta", "expected"), KL_GRADIENTS)
def test_the_gradient_of_k3_weighted_by_the_ratio(source, log_probs, ref, beta, expected):
    new = f64(log_probs).requires_grad_()
    ratio = log_ratio(new, f64(log_probs)).exp()
    (beta * masked_mean(ratio * k3(new, f64(ref), ones(ref)), ones(ref))).backward()
    close(new.grad, expected, within=1e-6)


def test_the_controller_of_beta():
    """skyrl utils test_adaptive_kl_controller_update"""
    assert adaptive_beta(0.2, kl=0.2, target=0.1, rows=10, horizon=100) == pytest.approx(0.204)


# --- policy losses ----------------------------------------------------------------------------

CLIP = {"kind": "clip", "eps_low": 0.2, "eps_high": 0.2}
HALF_TO_THREE_HALVES = ([[-1.69315, -1.0, -0.59453]], [[-1.0, -1, -1]])  # ratios 0.5, 1, 1.5
HALF_TO_TEN = ([[-1.69315, -1.0, -0.69741]], [[-1.0, -1, -3]])  # ratios 0.5, 1, 10
LOG2 = math.log(2)
LOSSES = [
    # update, new log-probs, old log-probs, advantages, loss per token
    (
        "nemo losses test_clipped_pg_loss_ppo_clipping",
        *(CLIP, *HALF_TO_THREE_HALVES, [[1.0, -1, 2]]),
        [[-0.5, 1.0, -2.4]],
    ),
    (
        "nemo losses test_clipped_pg_loss_reinforce_mode",
        *({"kind": "reinforce"}, [[-0.5, -1, -1.5]], [[0.0, 0, 0]], [[1.0, -1, 2]]),
        [[0.5, -1.0, 3.0]],
    ),
    (
        "nemo losses test_clipped_pg_loss_force_on_policy_ratio",
        *(CLIP, HALF_TO_THREE_HALVES[0], HALF_TO_THREE_HALVES[0], [[1.0, -1, 2]]),
        [[-1.0, 1.0, -2.0]],
    ),
    (
        "nemo losses test_clipped_pg_loss_cispo",
        *(CLIP | {"kind": "cispo"}, *HALF_TO_THREE_HALVES, [[1.0, -1, 2]]),
        [[0.8 * 1.69315, -1.0, 2.4 * 0.59453]],
    ),
    (
        "nemo losses test_clipped_pg_loss_dual_clip",
        *(CLIP | {"dual_clip": 3.0}, *HALF_TO_TEN, [[1.0, -1, -4]]),
        [[-0.5, 1.0, 12.0]],
    ),
    (
        "nemo losses test_clipped_pg_loss_dual_clip, before the dual clip",
        *(CLIP, *HALF_TO_TEN, [[1.0, -1, -4]]),
        [[-0.5, 1.0, 40.0]],
    ),
    (
        "skyrl losses test_policy_loss_dual_clip",
        *(CLIP | {"dual_clip": 3.0}, *HALF_TO_TEN, [[1.0, -1, -4]]),
        [[-0.5, 1.0, 12.0]],
    ),
    (
        "skyrl losses test_policy_loss_cispo",
        *(CLIP | {"kind": "cispo"}, *HALF_TO_TEN, [[1.0, -1, -4]]),
        [[1.35452, -1.0, -3.347568]],
    ),
    (
        "skyrl losses test_policy_loss_cispo_rollout_anchor",  # with the rollout's as the old
        CLIP | {"kind": "cispo"},
        [[-1.69315, -1.0, -0.69741]],
        [[-1.30685, -1.5, -1.0]],
        [[1.0, -1, -4]],
        [[1.35452, -1.2, -3.347568]],
    ),
    (
        "slime policy test_compute_policy_loss_applies_dual_clip_to_negative_advantages",
        CLIP | {"dual_clip": 1.5},
        [[LOG2, LOG2, -LOG2]],
        [[0.0, 0, 0]],
        [[2.0, -2, 2]],
        [[-2.4, 3.0, -1.0]],
    ),
    (
        "nemo losses test_clipped_pg_loss_gspo",
        *(CLIP | {"kind": "gspo"}, *HALF_TO_THREE_HALVES, [[1.0, -1, 2]]),
        [[-0.9086, 0.9086, -1.8171]],
    ),
    (
        "nemo losses test_clipped_pg_loss_gspo_batch_size_2",
        CLIP | {"kind": "gspo"},
        [HALF_TO_THREE_HALVES[0][0]] * 2,
        [[-1.0, -1, -1], [-2.0, -2, -2]],
        [[1.0, -1, 2]] * 2,
        [[-0.9086, 0.9086, -1.8171], [-1.2, 2.4697, -2.4]],
    ),
    (
        "torchtune loss test_policy_loss_clipped_for_high_logprobs",
        *(CLIP, [[1.5, 1.8, 2.2]], [[0.5, 0.8, 1.2]], [[1.0, 1, 1]]),
        [[-1.2, -1.2, -1.2]],
    ),
    (
        "torchtune loss test_policy_loss_lower_for_higher_advantages, high",
        *(CLIP, [[-0.5, -0.8, -1.2]], [[-0.5, -0.8, -1.2]], [[1.0, 2, 3]]),
        [[-1.0, -2.0, -3.0]],
    ),
    (
        "torchtune loss test_policy_loss_lower_for_higher_advantages, low",
        *(CLIP, [[-0.5, -0.8, -1.2]], [[-0.5, -0.8, -1.2]], [[0.5, 1, 1.5]]),
        [[-0.5, -1.0, -1.5]],
    ),
]


@table(("source", "update", "new", "old", "advantages", "expected"), LOSSES)
def test_policy_losses_per_token(source, update, new, old, advantages, expected):
    close(loss_of(new, old, advantages, **update).per_token, expected, within=2e-3)


MEAN_LOSSES = [
    # The mean over the tokens as published: which row of LOSSES it is about, and the number.
    ("nemo losses test_clipped_pg_loss_ppo_clipping", -0.6333),
    ("nemo losses test_clipped_pg_loss_reinforce_mode", 0.8333),
    ("nemo losses test_clipped_pg_loss_dual_clip", 4.1667),
    ("nemo losses test_clipped_pg_loss_gspo", -0.6057),
    ("nemo losses test_clipped_pg_loss_gspo_batch_size_2", -0.4912),
    ("skyrl losses test_policy_loss_dual_clip", 12.5 / 3),
    ("skyrl losses test_policy_loss_cispo", -2.9930 / 3),
]


@table(("source", "mean"), MEAN_LOSSES)
def test_policy_losses_averaged(source, mean):
    (row,) = [row for row in LOSSES if row[0] == source]
    _, update, new, old, advantages, _ = row
    loss = loss_of(new, old, advantages, **update).per_token
    weights = cell_weights("token_mean", ones(new), 3, torch.float64)
    assert float(weighted_sum(loss, weights)) == pytest.approx(mean, abs=1e-3)


@table(
    ("source", "new", "published"),
    [
        ("torchtune loss test_policy_loss_clipped_for_low_logprobs", [[-0.5, -0.2, 0.2]], 0.8),
        ("torchtune loss test_policy_loss_not_clipped", [[0.6, 0.9, 1.3]], math.exp(0.1)),
    ],
)
def test_a_fallen_ratio_earns_what_it_is_on_purpose_where_torchtune_publishes_the_opposite(
    source, new, published
):
    """Its test compares with a relative tolerance of a million, so the number on the page is not
    what its own loss gives. A = 1 and ratio r below 1.2 cost -r: the clip takes away gains only."""
    ratio = math.exp(new[0][0] - 0.5)
    found = loss_of(new, [[0.5, 0.8, 1.2]], [[1.0, 1, 1]], **CLIP).per_token
    close(found, [[-ratio] * 3])
    assert abs(-ratio - published) > 1


CISPO = [
    # eps_low, eps_high, ratios, the same after the clamp
    ("slime cispo ppo_band", 0.2, 0.28, [1.0, 1.14, 1.56, 0.4], [1.0, 1.14, 1.28, 0.8]),
    ("slime cispo wide_minimax_band", 1.0, 4.0, [1.0, 3.0, 9.0, 0.4], [1.0, 3.0, 5.0, 0.4]),
]


@table(("source", "eps_low", "eps_high", "ratios", "clamped"), CISPO)
def test_cispo_scales_a_gradient_that_only_the_log_prob_carries(
    source, eps_low, eps_high, ratios, clamped
):
    """test_compute_cispo_loss_matches_closed_form_surrogate, and its test of the gradient"""
    advantages, new = [1.0, -0.5, 2.0, -1.0], f64([[-0.7, -1.2, -0.4, -2.1]])
    old = new - f64([ratios]).log()
    leaf = new.clone().requires_grad_()
    section = ActorSection(update={"kind": "cispo", "eps_low": eps_low, "eps_high": eps_high})
    inputs = LossInputs(leaf, old, f64([advantages]), ones(new.tolist()))
    loss = policy_loss(section.update, inputs)
    loss.per_token.sum().backward()
    weights = [-c * a for c, a in zip(clamped, advantages, strict=True)]
    close(loss.per_token.detach(), [[w * x for w, x in zip(weights, new[0].tolist(), strict=True)]])
    close(leaf.grad, [weights])
    assert loss.clipped[0].tolist() == [c != r for c, r in zip(clamped, ratios, strict=True)]


def test_gspo_and_ppo_on_rows_of_5_2_and_4_tokens():
    """skyrl losses test_gspo_importance_sampling_levels, by a loop over its three rows"""
    rows = [
        ([0.2, -2.5, -0.3, 0.1, -1.8], [1.5, 2.0, 1.0, 0.8, 0.5]),
        ([0.8, -0.2], [3.0, 1.5]),
        ([-0.5, 0.3, -1.7, 0.4], [0.5, 0.8, 1.2, 2.5]),
    ]
    width = 8
    new = [lp + [-1.0] * (width - len(lp)) for lp, _ in rows]
    advantages = [a + [0.0] * (width - len(a)) for _, a in rows]
    mask = [[1] * len(a) + [0] * (width - len(a)) for _, a in rows]
    by_token = by_row = 0.0
    for log_probs, row_advantages in rows:
        one = math.exp(statistics.fmean(lp + 1 for lp in log_probs))
        for lp, a in zip(log_probs, row_advantages, strict=True):
            own = math.exp(lp + 1)
            by_token -= min(own * a, min(max(own, 0.8), 1.2) * a)
            by_row -= min(one * a, min(max(one, 0.8), 1.2) * a)
    old = [[-1.0] * width] * 3
    where = mask_of(mask)
    ppo = loss_of(new, old, advantages, mask, **CLIP).per_token[where].sum()
    gspo = loss_of(new, old, advantages, mask, **CLIP | {"kind": "gspo"}).per_token[where].sum()
    close(ppo, by_token)
    close(gspo, by_row)


DPPO = [
    # divergence, limit, old, new, advantages, which tokens keep a gradient
    (
        "skyrl losses test_dppo_policy_loss tv_pos_adv_masked",
        *("tv", 0.2, [[-1.0] * 3], [[-0.3, -2.0, -0.9]], [[1.0, -1, 1]], [[0, 0, 1]]),
    ),
    (
        "skyrl losses test_dppo_policy_loss tv_wrong_direction_not_masked",
        *("tv", 0.2, [[-1.0] * 2], [[-2.0, -0.3]], [[1.0, -1]], [[1, 1]]),
    ),
    (
        "skyrl losses test_dppo_policy_loss kl_masked",
        *("kl", 0.05, [[-1.0] * 2], [[-0.1, -0.95]], [[1.0, 1]], [[0, 1]]),
    ),
    (
        "skyrl losses test_dppo_policy_loss kl_no_masking_within_delta",
        *("kl", 0.5, [[-1.0] * 2], [[-1.01, -0.99]], [[1.0, -1]], [[1, 1]]),
    ),
]


@table(("source", "divergence", "limit", "old", "new", "advantages", "kept"), DPPO)
def test_dppo_masks_a_token_that_moved_too_far(
    source, divergence, limit, old, new, advantages, kept
):
    update = {"kind": "dppo", "divergence": divergence, "max_divergence": limit}
    loss = loss_of(new, old, advantages, **update)
    surrogate = -f64(advantages) * (f64(new) - f64(old)).exp()
    close(loss.per_token, (surrogate * f64(kept)).tolist())
    assert (~loss.clipped).tolist() == mask_of(kept).tolist()


# --- value losses -----------------------------------------------------------------------------

VALUE_LOSSES = [
    # new values, old values, returns, clip (None = without), mean of the loss
    (
        "torchtune loss test_value_loss_lower_for_values_similar_to_return, similar",
        *([[0.9, 1.0, 1.1]], [[0.9, 1.0, 1.1]], [[1.0, 1, 1]], 0.2, 0.02 / 6),
    ),
    (
        "torchtune loss test_value_loss_lower_for_values_similar_to_return, less similar",
        *([[0.5, 1.5, 2.0]], [[0.9, 1.0, 1.1]], [[1.0, 1, 1]], 0.2, 1.5 / 6),
    ),
    (
        "nemo ppo test_mse_value_loss_masking",
        *([[1.0] * 4], [[0.0] * 4], [[0.0] * 4], None, 0.5),
    ),
    (
        "nemo ppo test_mse_value_loss_perfect_prediction",
        *([[0.3, -2.0]], [[0.3, -2.0]], [[0.3, -2.0]], None, 0.0),
    ),
    (
        "nemo ppo test_mse_value_loss_with_clipping",  # the larger error of 1 and 0.2 is that of 1
        *([[1.0]], [[0.0]], [[0.0]], 0.2, 0.5),
    ),
]


@table(("source", "new", "old", "returns", "clip", "mean"), VALUE_LOSSES)
def test_value_losses(source, new, old, returns, clip, mean):
    new, old, returns = f64(new), f64(old), f64(returns)
    loss = squared_value_loss(new, returns)
    if clip is not None:
        loss = clip_value_loss(new, old, returns, clip)
    assert float(loss.per_token.mean()) == pytest.approx(mean, abs=1e-12)


# --- aggregation ------------------------------------------------------------------------------

AGGREGATIONS = [
    # losses, mask, mode, width, number
    (
        "skyrl utils test_token_mean",
        *([[1.0, 2, 3], [4, 5, 6]], [[1, 1, 0], [1, 1, 1]], "token_mean", 3, 3.6),
    ),
    ("skyrl utils test_token_mean_all_masked", [[1.0, 2]], [[0, 0]], "token_mean", 2, 0.0),
    (
        "skyrl utils test_sequence_mean",
        *([[1.0, 2], [3, 4]], [[1, 1], [1, 0]], "seq_mean_token_mean", 2, 2.25),
    ),
    (
        "skyrl utils test_seq_mean_token_sum_norm",
        *([[2.0, 3], [9, 12]], [[1, 1], [1, 0]], "seq_mean_token_sum_norm", 10, 0.7),
    ),
    (
        "skyrl utils test_reduce_loss",  # a sum of 10 over two rows
        *([[1.0, 2, 3], [4, 5, 6]], [[1, 1, 1], [1, 0, 0]], "seq_mean_token_sum", 3, 10 / 2),
    ),
    (
        "openrlhf test_token_mean_aggregation_matches_verl_dp_average",
        [[1.0, 2, 0], [3, 4, 5], [7, 0, 0]],
        *([[1, 1, 0], [1, 1, 1], [1, 0, 0]], "token_mean", 3, 22 / 6),
    ),
    (
        "openrlhf test_seq_mean_token_mean_aggregation_matches_verl_dp_average",
        [[1.0, 3, 9], [2, 4, 0], [8, 0, 0]],
        *([[1, 1, 0], [1, 1, 0], [1, 0, 0]], "seq_mean_token_mean", 3, 13 / 3),
    ),
    (
        "openrlhf test_loss_batch_info_excludes_fully_masked_sequences",
        *([[1.0, 3], [5, 7]], [[1, 1], [0, 0]], "seq_mean_token_mean", 2, 2.0),
    ),
    (
        "openrlhf test_grad_accum_global_norm_matches_global_token_mean_over_window",
        [[1.0, 2, 0], [3, 4, 5], [6, 7, 0]],
        *([[1, 1, 0], [1, 1, 1], [1, 1, 0]], "token_mean", 3, 4.0),
    ),
]


@table(("source", "losses", "mask", "mode", "width", "expected"), AGGREGATIONS)
def test_aggregations(source, losses, mask, mode, width, expected):
    """Whole, and row by row as microbatches with the weights of the whole."""
    losses, mask = f64(losses), mask_of(mask)
    weights = cell_weights(mode, mask, width, torch.float64)
    assert float(weighted_sum(losses, weights)) == pytest.approx(expected, abs=1e-12)
    parts = [weighted_sum(losses[i : i + 1], weights[i : i + 1]) for i in range(len(losses))]
    assert float(sum(parts)) == pytest.approx(expected, abs=1e-12)


@table(
    ("source", "losses", "mask", "published", "ours"),
    [
        (
            "skyrl utils test_token_mean_legacy",
            [[2.0, 4], [6, 8], [10, 12], [14, 16]],
            *([[1, 1], [1, 0], [1, 1], [1, 1]], 8.5, 64 / 7),
        ),
        (
            "openrlhf test_grad_accum_global_norm_differs_from_per_microbatch_when_uneven",
            [[1.0, 2, 0], [3, 4, 5], [6, 7, 0]],
            *([[1, 1, 0], [1, 1, 1], [1, 1, 0]], 3.25, 4.0),
        ),
    ],
)
def test_a_token_weighs_the_same_in_every_microbatch_on_purpose(
    source, losses, mask, published, ours
):
    """A mean of the microbatches' means makes a token's weight depend on its neighbours."""
    weights = cell_weights("token_mean", mask_of(mask), 3, torch.float64)
    assert float(weighted_sum(f64(losses), weights)) == pytest.approx(ours)
    assert published != pytest.approx(ours)


# --- overlong shaping, and groups that are dropped ----------------------------------------------

OVERLONG = [
    # longest response, buffer, factor, lengths, scores, shaped scores
    ("nemo rewards test_reward_shaping_no_penalties", 25, 5, 1.0, [10, 15, 18], [1.0, 0.5, 0.8],
     [1.0, 0.5, 0.8]),
    ("nemo rewards test_reward_shaping_with_penalties", 25, 5, 0.5, [10, 22, 25], [1.0, 0.8, 0.6],
     [1.0, 0.6, 0.1]),
    ("nemo rewards test_reward_shaping_preserves_unshaped_reward_overlong", 25, 5, 0.5,
     [10, 22, 25], [0.0, 0, 0], [0.0, -0.2, -0.5]),
    ("trl rewards test_soft_overlong_punishment_short_completion", 100, 20, 1.0, [50], [0.0],
     [0.0]),
    ("trl rewards test_soft_overlong_punishment_long_completion", 100, 20, 1.0, [110], [0.0],
     [-1.0]),
    ("trl rewards test_soft_overlong_punishment_intermediate_completion", 100, 20, 1.0, [90], [0.0],
     [-0.5]),
]  # fmt: skip


@table(("source", "most", "buffer", "factor", "lengths", "scores", "expected"), OVERLONG)
def test_overlong_shaping(source, most, buffer, factor, lengths, scores, expected):
    penalty = overlong_penalty(torch.tensor(lengths), most, buffer, torch.float64)
    close(f64(scores) + factor * penalty, expected)


def test_a_response_beyond_the_limit_loses_no_more_on_purpose_where_nemo_goes_on():
    """nemo rewards test_reward_shaping_with_penalties: a length of 30 where 25 is the most costs
    -1 there with a factor of 0.5 (0.4 becomes -0.6), twice the whole penalty. DAPO's equation 13
    and TRL stop at the limit, which no sampled response exceeds here."""
    close(0.5 * overlong_penalty(torch.tensor([30]), 25, 5, torch.float64), [-0.5])


NO_SPREAD = [
    # scores, rows per group, groups that stay
    ("nemo grpo test_dapo_dynamic_sampling_filters_nonzero_std", [1.0, 0, 1, 0.5, 0.5, 0], 3,
     [True, True]),
    ("nemo grpo test_dapo_dynamic_sampling_filters_zero_std", [1.0, 1, 1, 0.5, 0.5, 0], 3,
     [False, True]),
    ("nemo grpo test_dapo_dynamic_sampling_batch_caching", [1.0, 0, 0.5], 3, [True]),
    # Before the penalty on length, by which the first group would be 0, -0.2 and -1.
    ("nemo grpo test_dapo_dynamic_sampling_filters_on_raw_metric_after_overlong_shaping",
     [0.0, 0, 0, 1, 0, 1], 3, [False, True]),
]  # fmt: skip


@table(("source", "scores", "samples", "expected"), NO_SPREAD)
def test_groups_without_spread(source, scores, samples, expected):
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    assert (~zero_spread(f64(scores), mask, samples)).tolist() == expected


# --- baselines of a group ---------------------------------------------------------------------


def on_last_token(scores: list[float], tokens: int = 3) -> torch.Tensor:
    return f64([[0.0] * (tokens - 1) + [s] for s in scores])


ROOT = 1 / math.sqrt(2)
GROUPS = [
    # estimator, samples per prompt, scores, advantages
    ("skyrl utils test_compute_rloo_outcome_advantage_basic", "rloo", 2, [6.0, 3, 9, 12],
     [3.0, -3, -3, 3]),
    ("skyrl utils test_compute_rloo_outcome_advantage_basic, alone", "rloo", 1, [1.0], [0.0]),
    ("nemo utils test_calculate_baseline_and_std_per_prompt_basic", "rloo", 3,
     [1.0, 2, 3, 4, 5, 6], [1 - 2.5, 0, 3 - 1.5, 4 - 5.5, 0, 6 - 4.5]),
    ("nemo utils test_calculate_baseline_and_std_per_prompt_single_generation_per_prompt", "rloo",
     1, [2.5, 4.0], [0.0, 0.0]),
    ("nemo utils test_calculate_baseline_and_std_per_prompt_identical_rewards", "rloo", 3,
     [3.0, 3, 3, 7, 7, 7], [0.0] * 6),
    ("nemo utils test_calculate_baseline_and_std_per_prompt_cuda_compatibility", "rloo", 2,
     [1.0, 2, 3, 4], [-1.0, 1, -1, 1]),
    ("skyrl utils test_compute_grpo_outcome_advantage_norm_std_false", "dr_grpo", 2,
     [6.0, 3, 9, 12], [1.5, -1.5, -1.5, 1.5]),
    ("nemo grpo test_grpo_advantage_estimator_zero_std", "grpo", 2, [2.0, 2, 1, 3],
     [0.0, 0, -ROOT, ROOT]),
    ("nemo grpo test_grpo_advantage_estimator_tensor_shapes", "grpo", 2, [1.0, 3], [-ROOT, ROOT]),
    ("nemo grpo test_grpo_advantage_estimator_tensor_shapes, ten", "grpo", 10,
     [float(i) for i in range(10)], [(i - 4.5) / math.sqrt(82.5 / 9) for i in range(10)]),
    ("nemo grpo test_grpo_advantage_estimator_negative_advantages", "grpo", 3, [0.0, 2, 4],
     [-1.0, 0, 1]),
    ("nemo grpo test_grpo_advantage_estimator_zero_std_and_zero_advantage", "grpo", 4,
     [5.0, 5, 5, 5], [0.0] * 4),
    ("nemo grpo test_grpo_advantage_estimator_small_nonzero_std", "grpo", 2, [1.0, 1.01],
     [-ROOT, ROOT]),
]  # fmt: skip


@table(("source", "estimator", "samples", "scores", "expected"), GROUPS)
def test_baselines_of_a_group(source, estimator, samples, scores, expected):
    rewards = on_last_token(scores)
    mask = ones(rewards.tolist())
    match estimator:
        case "rloo":
            found = rloo(rewards, mask, samples)
        case "dr_grpo":
            found = minus_group_mean(rewards, mask, samples)
        case "grpo":
            found = grpo(rewards, f64(scores), mask, samples)
    close(found, [[a] * 3 for a in expected], within=2e-4)  # 1e-6 is added to the deviation


def test_a_row_that_does_not_count_is_in_no_baseline():
    """nemo utils test_calculate_baseline_and_std_per_prompt_nan_handling: baselines 3 and 1 for the
    rows of 1 and 3; and ..._mixed_prompt_sizes: baselines 2 and 1 for a prompt with two rows"""
    mask = mask_of([[1, 1, 1], [0, 0, 0], [1, 1, 1]])
    found = rloo(on_last_token([1.0, 999, 3]), mask, 3)
    close(found[:, 0], [1.0 - 3, 0, 3.0 - 1])
    mask = mask_of([[1, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    found = rloo(on_last_token([1.0, 2, 0, 4, 5, 6]), mask, 3)
    close(found[:, 0], [1.0 - 2, 2.0 - 1, 0, 4 - 5.5, 0, 6 - 4.5])


GDPO = [
    # named rewards, weights, advantages: a reward without spread adds nothing
    ("nemo grpo test_gdpo_advantage_estimator_multiple_rewards",
     [[1.0, 1], [1.0, -1], [1.0, 0]], [1.0, 1, 1], [0.7071, -0.7071]),
    # Its weights 1, 1 and 2, 2 give the same. By hand: (2a, -a, -a), a = 1/sqrt 3, over sqrt(3) a.
    ("nemo grpo test_gdpo_advantage_estimator_reward_weights",
     [[1.0, 0, 1], [1.0, 1, 0]], [1.0, 1], [1.1547, -0.5774, -0.5774]),
    ("nemo grpo test_gdpo_advantage_estimator_reward_weights, doubled",
     [[1.0, 0, 1], [1.0, 1, 0]], [2.0, 2], [1.1547, -0.5774, -0.5774]),
    # Its weights 1 and 1/4 do not: (5, -7, 2) a/4 over sqrt(39/16) a.
    ("nemo grpo test_gdpo_advantage_estimator_reward_weights, apart",
     [[1.0, 0, 1], [1.0, 1, 0]], [1.0, 0.25], [0.8006, -1.1209, 0.3203]),
]  # fmt: skip


@table(("source", "rewards", "weights", "expected"), GDPO)
def test_rewards_normalised_apart(source, rewards, weights, expected):
    parts = [WeightedReward(float(w), f64(r)) for w, r in zip(weights, rewards, strict=True)]
    mask = torch.ones(len(rewards[0]), 1, dtype=torch.bool)
    close(gdpo(parts, mask, len(rewards[0]))[:, 0], expected, within=1e-4)


DISTILLED = [
    # teacher, student, mask, advantages
    ("nemo estimators test_opd_metrics_returned", [[0.0] * 4] * 2, [[-1.0] * 4] * 2, [[1] * 4] * 2,
     [[1.0] * 4] * 2),
    ("nemo estimators test_opd_teacher_equals_student", [[-0.3, -2.0]], [[-0.3, -2.0]], [[1, 1]],
     [[0.0, 0.0]]),
    ("nemo estimators test_opd_mask_applied", [[0.0] * 6], [[-1.0] * 6], [[1, 1, 1, 0, 0, 0]],
     [[1.0, 1, 1, 0, 0, 0]]),
]  # fmt: skip


@table(("source", "teacher", "student", "mask", "expected"), DISTILLED)
def test_distillation_by_tokens(source, teacher, student, mask, expected):
    mask = mask_of(mask)
    close(distillation(k1(f64(student), f64(teacher), mask), mask), expected)


TO_GO = [
    # rewards, mask, gamma, returns
    ("skyrl utils test_compute_reinforce_plus_plus_outcome_advantage_gamma",
     [[1.0, 2, 3]], [[1, 1, 1]], 0.5, [[2.75, 3.5, 3.0]]),
    # Its third return is 3: the masked token's own reward, which nothing reads.
    ("skyrl utils test_compute_reinforce_plus_plus_outcome_advantage_returns_and_masking",
     [[1.0, 2, 3]], [[1, 1, 0]], 1.0, [[3.0, 2.0, 0.0]]),
    # Its masked cells hold the reward too; ours hold 0.
    ("nemo ppo test_raw_reward_basic_broadcast_and_masking",
     [[0.0, 0, 2, 0], [0, -1, 0, 0]], [[1, 1, 1, 0], [1, 1, 0, 0]], 1.0,
     [[2.0, 2, 2, 0], [-1, -1, 0, 0]]),
]  # fmt: skip


@table(("source", "rewards", "mask", "gamma", "expected"), TO_GO)
def test_rewards_to_go(source, rewards, mask, gamma, expected):
    close(reward_to_go(f64(rewards), mask_of(mask), gamma), expected)


def test_whitening_is_unbiased_on_purpose_where_nemo_divides_by_n():
    """nemo grpo test_reinforce_plus_plus_global_normalization: rewards 0 to 3 on five tokens each
    give -1.3416, -0.4472, 0.4472, 1.3416 there. Ours are smaller by sqrt(19/20): 20 tokens, and the
    deviation that PyTorch, torchtune, trlx and TRL mean by default."""
    rewards = on_last_token([0.0, 1, 2, 3], tokens=5)
    mask = ones(rewards.tolist())
    found = whitened(minus_group_mean(rewards, mask, 4), mask)[:, 0]
    published = f64([-1.3416, -0.4472, 0.4472, 1.3416])
    close(found, (published * math.sqrt(19 / 20)).tolist(), within=1e-4)


# --- importance weights -----------------------------------------------------------------------

SKYRL_OLD, SKYRL_ROLLOUT = [[-1.0, -1.5, -0.5]], [[-1.5, -1.0, -1.5]]
NEMO_OLD, NEMO_ROLLOUT = [[-1.0, -1, -1]], [[-0.5, -1.5, -0.8]]
UNCAPPED = 1e9
WEIGHTS = [
    # kind, cap, old, rollout, mask, weights
    ("skyrl correction test_compute_tis_ratio_token_level", "token", 2.0, SKYRL_OLD, SKYRL_ROLLOUT,
     [[1, 1, 1]], [[1.6487, 0.6065, 2.0]]),
    ("skyrl correction test_compute_tis_ratio_sequence_level", "sequence", 5.0, SKYRL_OLD,
     SKYRL_ROLLOUT, [[1, 1, 1]], [[2.7183] * 3]),
    ("skyrl correction test_compute_tis_ratio_sequence_level_with_cap", "sequence", 5.0,
     [[-1.0] * 3], [[-2.0] * 3], [[1, 1, 1]], [[5.0] * 3]),
    ("skyrl correction test_compute_tis_ratio_with_mask", "sequence", 10.0, SKYRL_OLD,
     SKYRL_ROLLOUT, [[1, 0, 1]], [[4.4817, 0.0, 4.4817]]),
    ("skyrl correction test_compute_off_policy_correction_tis_only", "token", 2.0, [[-1.0] * 3],
     [[-1.5] * 3], [[1, 1, 1]], [[1.6487] * 3]),
    ("nemo losses test_clipped_pg_loss_on_policy_kl_importance_sampling", "token", UNCAPPED,
     NEMO_OLD, NEMO_ROLLOUT, [[1, 1, 1]], [[0.6065, 1.6487, 0.8187]]),
    ("nemo losses test_clipped_pg_loss_on_policy_truncated_importance_sampling, tokens", "token",
     0.8, NEMO_OLD, NEMO_ROLLOUT, [[1, 1, 1]], [[0.6065, 0.8, 0.8]]),
    ("nemo losses test_clipped_pg_loss_on_policy_truncated_importance_sampling, sequence",
     "sequence", 0.8, NEMO_OLD, NEMO_ROLLOUT, [[1, 1, 1]], [[0.8] * 3]),
    ("nemo losses test_clipped_pg_loss_gspo_importance_sampling_correction", "sequence", UNCAPPED,
     NEMO_OLD, NEMO_ROLLOUT, [[1, 1, 1]], [[0.8187] * 3]),
    ("nemo losses test_clipped_pg_loss_tis_min_bound_defaults_to_zero", "token", 2.0,
     [[math.log(0.1), 0.0, math.log(3)]], [[0.0, 0, 0]], [[1, 1, 1]], [[0.1, 1.0, 2.0]]),
]  # fmt: skip


@table(("source", "kind", "cap", "old", "rollout", "mask", "expected"), WEIGHTS)
def test_importance_weights(source, kind, cap, old, rollout, mask, expected):
    d = mismatch(f64(old), f64(rollout), mask_of(mask))
    close(correction_weights(kind, d, mask_of(mask), cap), expected, within=1e-4)


WEIGHTED = [
    # update, correction, cap, weighted loss per token and its mean
    ("nemo losses test_clipped_pg_loss_on_policy_kl_importance_sampling", CLIP, "token", UNCAPPED,
     [[-0.30325, 1.6487, -1.96488]], -0.2065),
    ("nemo losses test_clipped_pg_loss_on_policy_truncated_importance_sampling, tokens", CLIP,
     "token", 0.8, [[-0.3033, 0.8, -1.92]], -0.4744),
    ("nemo losses test_clipped_pg_loss_on_policy_truncated_importance_sampling, sequence",
     CLIP | {"kind": "gspo"}, "sequence", 0.8, [[-0.7268, 0.7268, -1.4537]], -0.4846),
    ("nemo losses test_clipped_pg_loss_gspo_importance_sampling_correction",
     CLIP | {"kind": "gspo"}, "sequence", UNCAPPED, [[-0.7439, 0.7439, -1.4877]], -0.4959),
]  # fmt: skip


@table(("source", "update", "kind", "cap", "expected", "mean"), WEIGHTED)
def test_losses_with_importance_weights(source, update, kind, cap, expected, mean):
    mask = ones(NEMO_OLD)
    weights = correction_weights(kind, mismatch(f64(NEMO_OLD), f64(NEMO_ROLLOUT), mask), mask, cap)
    found = weights * loss_of(*HALF_TO_THREE_HALVES, [[1.0, -1, 2]], **update).per_token
    close(found, expected, within=1e-3)
    assert float(found.mean()) == pytest.approx(mean, abs=5e-4)


def test_the_kl_between_engines_and_between_policies_are_two_numbers():
    """openrlhf test_policy_kl_metric_uses_policy_ratio_when_vllm_correction_is_enabled, and
    test_policy_kl_metric_is_not_clamped: a k1 of 100 nats is 100, though the ratio stops at e^20"""
    new, old, rollout = [[-0.2, -0.4]], [[-0.3, -0.1]], [[-1.3, -1.1]]
    mask = ones(new)
    close(masked_mean(k1(f64(old), f64(new), mask), mask), (-0.1 + 0.3) / 2)
    close(masked_mean(-mismatch(f64(old), f64(rollout), mask), mask), -1.0)
    far, here = f64([[100.0]]), f64([[0.0]])
    close(k1(here, far, ones([[0.0]])), [[-100.0]])
    close(log_ratio(far, here), [[20.0]])


# --- pass@k and maj@k -------------------------------------------------------------------------

PASSED = [
    # scores of each prompt's responses, k, mean over prompts
    ("eureka test_estimate_pass_at_k, none right", [[0] * 10], 1, 0.0),
    ("eureka test_estimate_pass_at_k, half right, one", [[1] * 5 + [0] * 5], 1, 0.5),
    ("eureka test_estimate_pass_at_k, half right, five", [[1] * 5 + [0] * 5], 5, 0.996032),
    ("eureka test_estimate_pass_at_k, all right, one", [[1] * 10], 1, 1.0),
    ("eureka test_estimate_pass_at_k, all right, five", [[1] * 10], 5, 1.0),
    ("nemo eval test_eval_pass_k_basic", [[1, 0, 1]], 1, 2 / 3),
    ("nemo eval test_eval_pass_k_all_correct", [[1, 1, 1]], 1, 1.0),
    ("nemo eval test_eval_pass_k_none_correct", [[0, 0, 0]], 1, 0.0),
    ("nemo eval test_eval_pass_k_multiple_groups", [[1, 0, 1], [0, 1, 0]], 1, 0.5),
]


@table(("source", "groups", "k", "expected"), PASSED)
def test_pass_at_k(source, groups, k, expected):
    found = statistics.fmean(best_of_k([float(x) for x in scores], k) for scores in groups)
    assert found == pytest.approx(expected, abs=1e-6)


def test_more_responses_than_there_are_are_refused_on_purpose_where_eureka_has_a_number():
    """eureka test_estimate_pass_at_k gives 1 for the best of 10 where 3 of 5 are right. Ten fresh
    responses that pass with 3/5 do so in 1 - (2/5)^10 < 1 of all cases; nothing that 5 responses
    say is unbiased for more than 5 of them, so `tether eval` has no such k."""
    with pytest.raises(ValueError, match="k is 10, of 5 scores"):
        best_of_k([1.0] * 3 + [0.0] * 2, 10)


VOTED = [
    # answers, which of them is right, k, score of the vote
    ("nemo eval test_eval_cons_k_basic", ["A", "B", "A"], "A", 1, 2 / 3),
    # Its ties go to the answer that stands first; in this group that is the same as a third each.
    ("nemo eval test_eval_cons_k_multiple_groups, the first", ["C", "W1", "C", "W2", "C"], "C", 3,
     8 / 10),
]  # fmt: skip


@table(("source", "answers", "right", "k", "expected"), VOTED)
def test_majority_at_k(source, answers, right, k, expected):
    scores = [float(answer == right) for answer in answers]
    assert majority_of_k(scores, answers, k) == pytest.approx(expected)


def vote_with_ties_to_the_first(answers: list[str], right: str, k: int) -> float:
    """Every set of k votes; of tied answers the one that stands first wins."""
    won = []
    for some in itertools.combinations(answers, k):
        most = max(some.count(answer) for answer in some)
        won.append(next(answer for answer in some if some.count(answer) == most) == right)
    return statistics.fmean(won)


def test_a_tie_is_shared_on_purpose_where_nemo_gives_it_to_the_first():
    """nemo eval test_eval_cons_k_multiple_groups, the second: 3/10, since a wrong answer stands
    first. Responses have no order: put a right one first, and the same five would have 7/10. The
    mean over all orders is ours, 13/30."""
    answers = ["W3", "C", "W4", "C", "W4"]
    assert vote_with_ties_to_the_first(answers, "C", 3) == pytest.approx(3 / 10)
    right_first = ["C", "C", "W3", "W4", "W4"]
    assert vote_with_ties_to_the_first(right_first, "C", 3) == pytest.approx(7 / 10)
    every_order = [vote_with_ties_to_the_first([*order], "C", 3)
                   for order in itertools.permutations(answers)]  # fmt: skip
    ours = majority_of_k([float(answer == "C") for answer in answers], answers, 3)
    assert ours == pytest.approx(13 / 30)
    assert ours == pytest.approx(statistics.fmean(every_order))


# What came with VAPO, DAPO, GDPO, distillation and the evaluation people quote.
LATER = [LAMBDAS, OVERLONG, NO_SPREAD, GDPO, DISTILLED, PASSED, VOTED]
TABLES = [
    *(
        SB3_ENVIRONMENT,
        SB3_HORIZON,
        RETURNS,
        GAPS,
        SHAPED,
        MEANS,
        VARIANCES,
        KLS,
        KL_GRADIENTS,
    ),
    *(LOSSES, CISPO, DPPO, VALUE_LOSSES, AGGREGATIONS, GROUPS, TO_GO, WEIGHTS, WEIGHTED),
    *LATER,
]


def test_every_row_names_a_source_and_there_are_more_than_sixty():
    rows = [row for rows in TABLES for row in rows]
    unknown = [row[0] for row in rows if not any(row[0].startswith(name) for name in SOURCES)]
    assert not unknown
    assert len(rows) > 60


def test_at_least_twenty_of_them_are_about_what_the_papers_since_have_added():
    assert sum(map(len, LATER)) >= 20
