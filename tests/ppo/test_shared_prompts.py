"""Updates on rows that share their prompts, against the same updates on rows that do not."""

from dataclasses import replace

import pytest
import torch
from helpers import captured_gradients, configured, distinct_letters, made_experience, read_jsonl

import tether
from tether.data import shared_prompts
from tether.errors import UserError
from tether.ppo.result import first_controls
from tether.ppo.updates.actor import update_actor
from tether.ppo.updates.critic import update_critic
from tether.ppo.updates.minibatches import MinibatchSchedule, row_slices
from tether.ppo.updates.trpo import TrustRegion

A, B = [5, 9, 200, 17], [61, 62]
# Ragged, scattered, one row alone; column 2 of each is tool output (see `made_experience`).
PAIRS = [
    (A, [7, 8, 9]),
    (B, [1]),
    (A, [100, 3, 4, 5, 6, 7]),
    ([33, 34, 35], [36, 37, 38, 39]),
    (A, [7]),
    (B, [2, 3, 4, 5]),
    (A, [8, 8]),
]
ONE_STEP = {"actor__epochs": 1, "actor__minibatch_rows": 7, "critic__minibatch_rows": 7}
CASES = {
    "clip": {"actor__entropy_coef": 0.1, "actor__update": {"kind": "clip"}},
    "penalty": {"actor__update": {"kind": "penalty", "estimator": "full"}},
    "gspo": {"actor__update": {"kind": "gspo", "eps_low": 0.1, "eps_high": 0.1}},
    "cispo": {"actor__update": {"kind": "cispo"}},
    "dppo": {"actor__update": {"kind": "dppo"}},
    "reinforce": {"actor__update": {"kind": "reinforce"}},
    "cpi": {"actor__update": {"kind": "cpi"}},
    "full KL to the reference": {"kl__in_loss": {"coef": 0.3, "estimator": "full"}},
    "shared trunk": {"critic": {"shared_trunk": True}},
    "adapters": {"model__lora": {"rank": 2}, "model__critic_lora": {"rank": 2}},
    "recomputed layers": {"model__gradient_checkpointing": True},
}


@pytest.fixture
def always_packed(monkeypatch):
    """Pack rows that are too few for it to pay."""
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_TOKENS", 1)
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_SHARE", 0.0)


def gradients(roles, config, experience, monkeypatch) -> tuple[torch.Tensor, list]:
    """Gradients of the actor's and the critic's one step, and their losses."""
    found, losses = [], []
    with monkeypatch.context() as patch:
        steps = captured_gradients(roles.actor_optimizer, patch)
        reports = [update_actor(experience, roles, config, 0, first_controls(config))]
        if roles.critic_optimizer is not None:
            steps_of_critic = captured_gradients(roles.critic_optimizer, patch)
            reports.append(update_critic(experience, roles, config, 0))
            found += steps_of_critic[0]
        found += steps[0]
    for report in reports:
        losses += [x for name, x in sorted(report.meter.values().items()) if "loss" in name]
    return torch.cat([g.reshape(-1) for g in found]), losses


@pytest.mark.usefixtures("float64_norms", "always_packed")
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_rows_alone(build, monkeypatch, case, dtype, bound):
    roles, config = build(**{**ONE_STEP, "model__dtype": dtype, **CASES[case]})
    if case == "adapters":  # these start at 0, and the value head too
        torch.manual_seed(1)
        for weight in roles.actor_optimizer.parameters:
            torch.nn.init.normal_(weight, std=0.1)
    torch.nn.init.normal_(roles.critic.head.weight, std=0.1)
    experience = made_experience(roles, pairs=PAIRS, unscored=(4,))
    expected, losses = gradients(roles, config, experience, monkeypatch)
    shared = replace(experience, sequences=replace(experience.sequences, share_prompts=True))
    for tokens in (4096, 20):  # all together; then a prompt's rows in several microbatches
        actor = config.actor.model_copy(update={"microbatch_tokens": tokens})
        critic = config.critic.model_copy(update={"microbatch_tokens": tokens})
        small = config.model_copy(update={"actor": actor, "critic": critic})
        found, shared_losses = gradients(roles, small, shared, monkeypatch)
        assert float((found - expected).norm()) <= bound * float(expected.norm())
        assert shared_losses == pytest.approx(losses, rel=10 * bound, abs=bound)
    assert losses
    assert float(expected.norm()) > 1e-3


@pytest.mark.usefixtures("float64_norms", "always_packed")
def test_trpo_measures_and_differentiates_as_on_rows_alone(build):
    roles, config = build(
        **{"model__dtype": "float64", "actor__entropy_coef": 0.0, "actor__update__kind": "trpo"}
    )
    experience = made_experience(roles, pairs=PAIRS)
    shared = replace(experience, sequences=replace(experience.sequences, share_prompts=True))
    plain, packed = (TrustRegion(e, roles.actor, config) for e in (experience, shared))
    expected, found = plain.surrogate_gradient(), packed.surrogate_gradient()
    assert float((found - expected).norm()) <= 1e-12 * float(expected.norm())
    expected, found = plain.fisher_product(expected), packed.fisher_product(expected)
    assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())  # a difference
    assert packed.measure() == pytest.approx(plain.measure(), rel=1e-12, abs=1e-13)
    torch.testing.assert_close(packed.new_log_probs(), plain.new_log_probs(), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("float64_norms", "always_packed")
def test_old_log_probs_references_and_values_are_those_of_rows_alone(build):
    roles, _ = build(model__dtype="float64")
    torch.nn.init.normal_(roles.critic.head.weight, std=0.1)
    experience = made_experience(roles, pairs=PAIRS)
    mask, plain = experience.response_mask, experience.sequences
    shared = replace(plain, share_prompts=True)
    close = {"rtol": 0, "atol": 1e-12}
    expected = roles.actor.log_probs(plain, mask)
    torch.testing.assert_close(roles.actor.log_probs(shared, mask), expected, **close)
    read = [roles.reference.log_probs(s, mask, expected) for s in (plain, shared)]
    torch.testing.assert_close(*read, **close)
    values = [roles.critic.values(s, mask) for s in (plain, shared)]
    torch.testing.assert_close(*values, **close)


def long_prompts(tmp_path, config: dict) -> dict:
    """Prompts of 40 tokens, 4 samples: enough for packing to pay at its own bounds."""
    path = tmp_path / "long.jsonl"
    path.write_text("".join(f'{{"prompt": "{str(n) * 40}"}}\n' for n in range(6)))
    rollout = {"prompts": 4, "samples_per_prompt": 4, "max_response_tokens": 8}
    actor = {"minibatch_rows": 8, "shuffle": "prompts", "lr": 1e-3}
    data = {"train": str(path), "heldout": str(path)}
    return {**config, "data": data, "rollout": rollout, "actor": actor, "critic": {}}


def test_a_run_learns_the_same_and_says_what_it_saved(tiny_config, tmp_path):
    config = long_prompts(tmp_path, tiny_config)
    found = {}
    for share in (True, False):
        run = tmp_path / f"share-{share}"
        model = {**config["model"], "share_prompts": share}
        tether.train({**config, "model": model, "run": {"dir": str(run)}}, reward=distinct_letters)
        found[share] = read_jsonl(run / "metrics.jsonl")
    saved = [line.pop(name) for line in found[True] for name in SAVED]
    # 2 prompts of 40 in a minibatch of 8 rows: 240 tokens of 320 and the responses.
    assert all(240 / (320 + 64) <= share <= 240 / 320 for share in saved)
    assert not any(name in line for line in found[False] for name in SAVED)
    for ours, theirs in zip(found[True], found[False], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


SAVED = ("actor/shared_tokens", "critic/shared_tokens")


@pytest.mark.parametrize("together", [1, 2, 3])
def test_a_prompt_s_rows_share_a_minibatch_where_prompts_are_shuffled(together):
    schedule = MinibatchSchedule("actor", 3, 0, 2, 6, 99, "token_mean", 12, together=together)
    slices = [rows.tolist() for rows in row_slices(24, schedule)]
    assert [len(rows) for rows in slices] == [6] * 8
    for epoch in (slices[:4], slices[4:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(24))
    for rows in slices:
        blocks = {row // together for row in rows}
        assert len(blocks) * together == len(rows)
    assert slices[:4] != slices[4:]


def test_a_minibatch_that_would_split_a_prompt_is_refused_by_name(scored_config):
    given = {"actor__shuffle": "prompts", "actor__minibatch_rows": 5}
    with pytest.raises(UserError, match=r"actor\.minibatch_rows is 5.*a multiple of 2"):
        configured(scored_config, **given)
    given = {"critic__shuffle": "prompts", "critic__minibatch_rows": 3}
    with pytest.raises(UserError, match=r"critic\.minibatch_rows is 3.*a multiple of 2"):
        configured(scored_config, **given)
