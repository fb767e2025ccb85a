"""One iteration from end to end: what it computed, against loops over its own rows."""

import math
import statistics

import pytest
import torch
from helpers import distinct_letters, response, slow_log_probs, table

from tether.ppo import iteration as iteration_module
from tether.ppo.iteration import run_iteration
from tether.ppo.result import Controls
from tether.ppo.rollout_log import logged_rows, rollout_rows
from tether.rewards.scorers import InProcessScorer

BETA = 0.3
CONTROLS = Controls(beta=BETA, penalty_coef=0.0)


def nudge(model, seed: int = 0, size: float = 0.1) -> None:
    """Move the weights a little, so that policies differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += size * torch.randn(weight.shape, generator=generator).to(weight.dtype)


@pytest.fixture
def iterate(build):
    """A function that runs iteration 0 with a reference that differs and a critic that speaks."""

    def iterated(reward=distinct_letters, **dotted):
        roles, config = build(reward, **dotted)
        nudge(roles.reference.policy.model)
        nudge(roles.critic, size=0.3)
        return run_iteration(0, CONTROLS, roles, config), config

    return iterated


def usable_rows(outcome) -> list[int]:
    return outcome.scores.usable.nonzero().squeeze(1).tolist()


def row_lists(outcome, name: str, row: int) -> list[float]:
    """The True cells of one row."""
    e = outcome.experience
    return getattr(e, name)[row][e.response_mask[row]].tolist()


def slow_row(outcome, config, row: int):
    """Rewards, advantages and returns of one row from its log-probs and values, by loops."""
    old, ref, values = (
        row_lists(outcome, name, row) for name in ("old_log_probs", "ref_log_probs", "values")
    )
    rewards = [-BETA * (a - b) for a, b in zip(old, ref, strict=True)]
    rewards[-1] += float(outcome.scores.values[row])
    gamma, lam = config.advantage.gamma, config.advantage.lam
    advantages, after, following = [], 0.0, float(outcome.experience.final_values[row])
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        after = reward + gamma * following - value + gamma * lam * after
        following = value
        advantages.insert(0, after)
    return rewards, advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_rewards_advantages_and_returns_are_those_of_a_loop(iterate, gamma):
    """Trap 8 and Trap 10 end to end: returns are made of raw advantages."""
    outcome, config = iterate(advantage__gamma=gamma)
    for row in range(12):
        rewards, advantages, returns = slow_row(outcome, config, row)
        assert row_lists(outcome, "token_level_rewards", row) == pytest.approx(rewards, abs=1e-4)
        assert row_lists(outcome, "advantages", row) == pytest.approx(advantages, abs=1e-3)
        assert row_lists(outcome, "returns", row) == pytest.approx(returns, abs=1e-3)
        kl = sum(row_lists(outcome, "kl", row))
        assert abs(kl) > 1e-3
        total = float(outcome.scores.values[row]) - BETA * kl
        assert sum(rewards) == pytest.approx(total, abs=1e-4)


def test_whitening_changes_no_return(iterate):
    """Trap 10: bit for bit, with and without."""
    white, _ = iterate(advantage__whiten=True)
    raw, _ = iterate(advantage__whiten=False)
    assert torch.equal(white.experience.returns, raw.experience.returns)
    assert torch.equal(raw.experience.policy_advantages, raw.experience.advantages)
    assert not torch.equal(white.experience.policy_advantages, raw.experience.advantages)


def test_policy_advantages_have_mean_zero_and_variance_one(iterate):
    outcome, _ = iterate()
    cells = [x for row in range(12) for x in row_lists(outcome, "policy_advantages", row)]
    assert statistics.fmean(cells) == pytest.approx(0, abs=1e-5)
    assert statistics.variance(cells) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_old_and_reference_log_probs_are_of_the_tempered_policies_before_the_update(
    build, temperature
):
    """Trap 3 and Trap 6 end to end."""
    roles, config = build(rollout__temperature=temperature, actor__lr=1e-12)
    nudge(roles.reference.policy.model)
    outcome = run_iteration(0, CONTROLS, roles, config)
    for row in range(4):
        start = outcome.rollout.prompt_ids.shape[1] - int(outcome.rollout.prompt_lengths[row])
        pair = outcome.rollout.prompt_ids[row, start:].tolist(), response(outcome.rollout, row)
        for name, policy in (
            ("old_log_probs", roles.actor),
            ("ref_log_probs", roles.reference.policy),
        ):
            expected = slow_log_probs(policy.model, *pair, temperature).tolist()
            assert row_lists(outcome, name, row) == pytest.approx(expected, abs=1e-4)


def test_the_first_minibatch_has_ratio_one_and_nothing_clipped(build):
    """Trap 5: one step on all rows, so every ratio is that of old weights to old weights."""
    roles, config = build(actor__epochs=1, actor__minibatch_rows=12, actor__microbatch_tokens=40)
    outcome = run_iteration(0, CONTROLS, roles, config)
    metrics = outcome.metrics(config)
    gap = (outcome.actor.new_log_probs - outcome.experience.old_log_probs).abs().max()
    assert float(gap) < 1e-5
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["actor/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["actor/approx_kl"] == pytest.approx(0, abs=1e-6)


def test_the_kl_is_zero_at_iteration_zero_and_no_more_at_the_next(build):
    """Trap 5: reference and actor start as the same weights; only the actor moves."""
    roles, config = build(actor__lr=0.01)
    first = run_iteration(0, CONTROLS, roles, config).metrics(config)
    assert first["kl/token_mean"] == pytest.approx(0, abs=1e-5)
    assert abs(run_iteration(1, CONTROLS, roles, config).metrics(config)["kl/token_mean"]) > 1e-3


def some_unscored(response: str) -> float | None:
    """Every response that begins with an even code point cannot be scored."""
    return None if ord(response[:1] or "\1") % 2 == 0 else distinct_letters(response)


def test_unscored_rows_leave_mask_whitening_and_metrics(iterate):
    """Trap 15 and Trap 17: every number is that of the remaining rows' cells alone."""
    outcome, config = iterate(some_unscored, reward__max_failed_share=1.0)
    kept = usable_rows(outcome)
    assert 2 < len(kept) < 12
    dropped = [row for row in range(12) if row not in kept]
    assert not outcome.experience.response_mask[dropped].any()
    assert sorted(e.row for e in outcome.events if e.kind == "unscorable") == dropped
    assert {e.kind for e in outcome.events} <= {"unscorable", "empty_minibatch"}

    cells = [x for row in kept for x in row_lists(outcome, "advantages", row)]
    assert int(outcome.moments.count) == len(cells)
    assert float(outcome.moments.mean) == pytest.approx(statistics.fmean(cells), abs=1e-5)
    assert float(outcome.moments.variance) == pytest.approx(statistics.variance(cells), rel=1e-4)

    kl = [row_lists(outcome, "kl", row) for row in kept]
    scores = [float(outcome.scores.values[row]) for row in kept]
    values = [x for row in kept for x in row_lists(outcome, "values", row)]
    rewards = [sum(row_lists(outcome, "token_level_rewards", row)) for row in kept]
    expected = {
        "score/mean": statistics.fmean(scores),
        "score/std": statistics.stdev(scores),
        "response/length_mean": statistics.fmean(map(len, kl)),
        "kl/token_mean": math.fsum(map(math.fsum, kl)) / sum(map(len, kl)),
        "kl/sequence_mean": statistics.fmean(map(math.fsum, kl)),
        "reward/mean": statistics.fmean(rewards),
        "advantage/mean": statistics.fmean(cells),
        "advantage/std": statistics.stdev(cells),
        "value/mean": statistics.fmean(values),
        "kl/coef": BETA,
    }
    metrics = outcome.metrics(config)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_an_unscored_row_is_null_in_the_rollouts_and_not_zero(iterate, vocabulary):
    """Trap 17."""
    outcome, config = iterate(some_unscored, reward__max_failed_share=1.0)
    rows = rollout_rows(outcome, vocabulary, config)
    assert [row["score"] is not None for row in rows] == outcome.scores.usable.tolist()
    assert [row["usable"] for row in rows] == outcome.scores.usable.tolist()


def test_sampled_ids_reach_the_updates_and_the_file_as_they_were_sampled(
    iterate, monkeypatch, byte_tokenizer, vocabulary
):
    """Trap 4: random bytes rarely survive text, so re-tokenising them would show."""
    seen = []
    update = iteration_module.update_actor
    monkeypatch.setattr(
        iteration_module, "update_actor", lambda e, *rest: seen.append(e) or update(e, *rest)
    )
    texts = []
    outcome, config = iterate(lambda response: texts.append(response) or 0.0)
    sampled = [response(outcome.rollout, row) for row in range(12)]
    assert any(byte_tokenizer(t).input_ids != ids for t, ids in zip(texts, sampled, strict=True))
    [experience] = seen
    ids = experience.sequences.response_ids
    assert [ids[row, : len(sampled[row])].tolist() for row in range(12)] == sampled
    rows = rollout_rows(outcome, vocabulary, config)
    assert [r["response_ids"] for r in rows] == sampled
    assert [r["response"] for r in rows] == texts
    assert [len(r["response_tokens"]) for r in rows] == [len(ids) for ids in sampled]


def test_under_bootstrap_a_truncated_row_is_not_scored_but_worth_what_the_critic_says(iterate):
    asked = []

    def reward(response: str, finished: bool) -> float:
        asked.append(finished)
        return 1.0

    outcome, config = iterate(
        reward, advantage__truncation="bootstrap", rollout__samples_per_prompt=20
    )
    truncated = outcome.rollout.truncated
    assert 0 < truncated.sum() < len(truncated)
    assert asked == [True] * int((~truncated).sum())
    assert (outcome.experience.final_values != 0).tolist() == truncated.tolist()
    assert (outcome.scores.values == 1).tolist() == (~truncated).tolist()
    row = int(truncated.nonzero()[0])
    _, advantages, _ = slow_row(outcome, config, row)
    assert row_lists(outcome, "advantages", row) == pytest.approx(advantages, abs=1e-3)


def test_rows_that_the_critic_stands_for_are_not_in_the_mean_score(iterate):
    """Trap 17: under bootstrap a truncated row has no score, which is not a score of 0."""
    outcome, config = iterate(
        lambda response: 1.0, advantage__truncation="bootstrap", rollout__samples_per_prompt=20
    )
    assert 0 < outcome.rollout.truncated.sum() < 120
    assert outcome.metrics(config)["score/mean"] == 1.0


def test_if_every_row_is_truncated_under_bootstrap_none_is_scored(iterate):
    outcome, _ = iterate(
        lambda response: 1 / 0,
        advantage__truncation="bootstrap",
        rollout__max_response_tokens=1,
        reward__max_failed_share=0.0,
    )
    assert outcome.events == []
    assert outcome.experience.advantages.isfinite().all()


def test_groups_without_a_usable_row_are_not_counted_among_those_without_spread(build):
    """Six groups: one without a score, one whose two scores tie, four whose scores differ."""
    scores = iter([None, None, 0.5, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    roles, config = build(
        lambda response: next(scores), advantage__estimator="rloo", reward__max_failed_share=1.0
    )
    metrics = run_iteration(0, CONTROLS, roles, config).metrics(config)
    assert metrics["advantage/zero_spread_share"] == pytest.approx(1 / 5)


def test_one_cell_to_whiten_is_centred_only_and_an_event(iterate):
    outcome, config = iterate(
        rollout__prompts=1,
        rollout__samples_per_prompt=1,
        rollout__max_response_tokens=1,
        actor__minibatch_rows=1,
        critic__minibatch_rows=1,
    )
    assert outcome.experience.policy_advantages.tolist() == [[0.0]]
    assert all(math.isfinite(x) for x in outcome.metrics(config).values())
    assert outcome.events


def test_an_iteration_without_a_usable_row_changes_no_weight_and_gives_no_nan(build):
    roles, config = build(lambda: None, reward__max_failed_share=1.0)
    before = [p.detach().clone() for p in roles.actor.model.parameters()]
    metrics = run_iteration(0, CONTROLS, roles, config).metrics(config)
    assert all(math.isfinite(x) for x in metrics.values())
    after = roles.actor.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_missing_pad_token_or_one_that_is_the_eos_changes_nothing(build):
    """Trap 1."""
    outcomes = []
    for pad in ("<|pad|>", "<|end|>", None):
        roles, config = build()
        roles.vocabulary.tokenizer.pad_token = pad
        outcomes.append(run_iteration(0, CONTROLS, roles, config).metrics(config))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@table(
    ("rows", "samples", "max_rows", "kept"),
    [
        (12, 1, 5, [0, 2, 4, 7, 9]),
        (12, 2, 5, [0, 1, 6, 7]),
        (12, 4, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (12, 6, 5, [0, 2, 4, 7, 9]),
        (4, 2, 64, [0, 1, 2, 3]),
    ],
)
def test_rows_kept_of_a_rollout_are_whole_groups_evenly_spaced(rows, samples, max_rows, kept):
    assert logged_rows(rows, samples, max_rows) == kept


def test_a_scorer_that_is_called_sees_prompt_response_and_columns(build):
    roles, config = build()
    seen = []
    roles.reward.function = lambda **row: seen.append(row) or 0.0
    assert isinstance(roles.reward, InProcessScorer)
    run_iteration(0, CONTROLS, roles, config)
    assert len(seen) == 12
    given = {"prompt", "answer", "response", "finished"}
    given |= {"policy_turns", "observations", "policy_tokens"}
    assert all(set(row) == given for row in seen)
    assert all(row["policy_turns"] == [row["response"]] for row in seen)
    assert all(row["observations"] == [] for row in seen)
    assert all(sum(map(int, row["prompt"][:-2].split("+"))) == int(row["answer"]) for row in seen)
