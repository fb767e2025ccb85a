import pytest
import torch
from helpers import f64, grids, numbers, table
from hypothesis import given
from hypothesis import strategies as st

from tether.algo.advantages import (
    AdvantageInputs,
    bootstrap_values,
    critic_returns,
    estimate_advantages,
    gae,
    policy_lambda,
)
from tether.config import AdvantageSection

REWARDS = f64([[-0.0003, -0.0002, -0.0003, -0.0002, -0.0003, 0.9999]])
VALUES = f64([[0.82, 0.85, 0.88, 0.90, 0.92, 0.95]])
ALL = torch.ones(1, 6, dtype=torch.bool)
NOTHING = torch.zeros(1, dtype=torch.float64)


def slow_gae(rewards, values, final, gamma, lam):
    """One row without masked cells: the sum over k of (gamma lam)^k delta_(t+k), term by term."""
    following = [*values, final][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


@table(
    ("lam", "expected"),
    [
        (0.0, [0.0297, 0.0298, 0.0197, 0.0198, 0.0297, 0.0499]),  # the deltas
        (1.0, [0.1786, 0.1489, 0.1191, 0.0994, 0.0796, 0.0499]),
        (0.95, [0.155568, 0.132492, 0.108097, 0.093050, 0.077105, 0.049900]),
    ],
)
def test_advantages_of_the_six_token_example(lam, expected):
    found = gae(REWARDS, VALUES, NOTHING, ALL, 1.0, lam)[0].tolist()
    assert found == pytest.approx(expected, abs=1e-6)


@table(
    ("lam", "expected"),
    [
        (1.0, [0.9986, 0.9989, 0.9991, 0.9994, 0.9996, 0.9999]),
        (0.95, [0.975568, 0.982492, 0.988097, 0.993050, 0.997105, 0.999900]),
    ],
)
def test_returns_of_the_six_token_example(lam, expected):
    returns = gae(REWARDS, VALUES, NOTHING, ALL, 1.0, lam) + VALUES
    assert returns[0].tolist() == pytest.approx(expected, abs=1e-6)


@given(
    grids(numbers, numbers, st.booleans()),
    st.floats(-3, 3),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_masked_columns_count_as_if_they_had_been_cut_out(cells, final, gamma, lam):
    """Trap 11: tool output neither decays nor rewards; masked cells hold 0."""
    rewards, values, mask = cells
    finals = f64([final] * len(mask))
    found = gae(f64(rewards), f64(values), finals, torch.tensor(mask), gamma, lam).tolist()
    for row, flags in enumerate(mask):
        kept = [t for t, flag in enumerate(flags) if flag]
        expected = slow_gae(
            [rewards[row][t] for t in kept], [values[row][t] for t in kept], final, gamma, lam
        )
        assert [found[row][t] for t in kept] == pytest.approx(expected, abs=1e-9)
        assert all(found[row][t] == 0 for t in range(len(flags)) if t not in kept)


def test_rubbish_in_masked_cells_reaches_no_advantage():
    mask = torch.tensor([[True, False, True]])
    clean = gae(f64([[1, 0, 2]]), f64([[3, 0, 5]]), NOTHING, mask, 0.9, 0.8)
    dirty = gae(f64([[1, 99, 2]]), f64([[3, -99, 5]]), NOTHING, mask, 0.9, 0.8)
    assert torch.equal(clean, dirty)


def test_what_follows_a_response_is_zero_unless_it_was_truncated_under_bootstrap():
    after, truncated = f64([0.5, 0.7]), torch.tensor([False, True])
    assert bootstrap_values(after, truncated, "zero").tolist() == [0, 0]
    assert bootstrap_values(after, truncated, "bootstrap").tolist() == [0, 0.7]


def inputs_of(rewards, values, mask=None, final=None):
    rewards, values = f64(rewards), f64(values)
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else torch.tensor(mask)
    rows = len(rewards)
    nothing = torch.zeros(rows, dtype=torch.float64)
    final = nothing if final is None else f64(final)
    return AdvantageInputs(rewards, values, final, nothing, nothing, mask, samples=1)


def test_the_critic_learns_by_a_lambda_of_its_own():
    """By hand: deltas 1, 1, 2; lambda 0 gives the policy these, lambda 1 the critic a return of 5
    everywhere, lambda 1/2 returns of 1 + 1 + 1/2 + 2/4 = 3, 2 + 1 + 2/2 = 4 and 5."""
    inputs = inputs_of([[0.0, 0, 5]], [[1.0, 2, 3]])
    section = AdvantageSection(lam=0.0)
    advantages = estimate_advantages(section, inputs)
    assert advantages.tolist() == [[1, 1, 2]]
    assert critic_returns(section, inputs, advantages, 1.0).tolist() == [[5, 5, 5]]
    assert critic_returns(section, inputs, advantages, 0.5).tolist() == [[3, 4, 5]]
    assert critic_returns(section, inputs, advantages, None).tolist() == [[2, 3, 5]]


@table(
    ("alpha", "tokens", "expected"),
    [(0.05, 20, 0.0), (0.05, 40, 0.5), (0.05, 200, 0.9), (0.5, 1, 0.0), (0.5, 4, 0.5)],
)
def test_lambda_by_length(alpha, tokens, expected):
    section = AdvantageSection(lam=0.3, lam_alpha=alpha)
    mask = torch.ones(1, tokens, dtype=torch.bool)
    assert policy_lambda(section, mask, torch.float64).tolist() == pytest.approx(
        [expected], abs=1e-12
    )
    assert section.row_lam(tokens) == pytest.approx(expected, abs=1e-12)


@given(grids(numbers, numbers, st.booleans()), st.floats(0, 1), st.floats(0.01, 5), st.floats(0, 1))
def test_a_lambda_per_row_is_gae_row_by_row_and_never_changes_the_critics_returns(
    cells, gamma, alpha, lam
):
    """Each row alone, with the lambda of its own sampled tokens; the returns by `critic.lam` are
    those of a run without `lam_alpha`."""
    rewards, values, mask = cells
    inputs = inputs_of(rewards, values, mask)
    section = AdvantageSection(gamma=gamma, lam_alpha=alpha)
    found = estimate_advantages(section, inputs)
    for row, flags in enumerate(mask):
        own = 1 - 1 / max(1.0, alpha * sum(flags))
        alone = inputs_of([rewards[row]], [values[row]], [flags])
        expected = gae(alone.rewards, alone.values, alone.final_values, alone.mask, gamma, own)
        torch.testing.assert_close(found[row : row + 1], expected, rtol=1e-9, atol=1e-9)
    plain = AdvantageSection(gamma=gamma)
    usual = estimate_advantages(plain, inputs)
    assert torch.equal(
        critic_returns(section, inputs, found, lam), critic_returns(plain, inputs, usual, lam)
    )


@given(grids(numbers, numbers), st.floats(0, 1), st.floats(0, 1))
def test_with_lambda_one_the_returns_forget_the_values(cells, gamma, lam):
    """VC-PPO's reason: the critic's target is then the discounted reward-to-go alone."""
    rewards, values = cells
    section = AdvantageSection(gamma=gamma, lam=lam)
    inputs, others = (inputs_of(rewards, v) for v in (values, [[x + 1 for x in r] for r in values]))
    found, moved = (
        critic_returns(section, x, estimate_advantages(section, x), 1.0) for x in (inputs, others)
    )
    torch.testing.assert_close(found, moved, rtol=1e-9, atol=1e-9)
