"""What is read before the updates: the same numbers, in as few passes as it takes."""

import pytest
import torch
from helpers import sample

from tether.data.batching import join
from tether.ppo.experience import old_log_probs_and_values
from tether.ppo.iteration import run_iteration
from tether.ppo.result import first_controls

PROMPTS = [[5, 9, 100], [1], [11, 12], [0, 21]]


def passes(roles, monkeypatch) -> list[int]:
    """From now on the rows of every pass over the actor's trunk are kept here."""
    seen, forward = [], roles.actor.model.model.forward

    def counted(*arguments, **named):
        seen.append(len(named["input_ids"]))
        return forward(*arguments, **named)

    monkeypatch.setattr(roles.actor.model.model, "forward", counted)
    return seen


@pytest.mark.parametrize("microbatch_tokens", [6, 1000])
def test_both_heads_over_one_pass_read_what_each_reads_over_its_own(
    build, monkeypatch, microbatch_tokens
):
    roles, config = build(
        critic={"shared_trunk": True, "microbatch_tokens": microbatch_tokens},
        actor__microbatch_tokens=microbatch_tokens,
    )
    torch.nn.init.normal_(roles.critic.head.weight)
    rollout = sample(roles.actor.model, PROMPTS)
    sequences, mask = join(rollout), rollout.response_mask.clone()
    mask[1, 2] = False
    expected = [
        roles.actor.log_probs(sequences, mask),
        *roles.critic.values(sequences, mask),
    ]
    seen = passes(roles, monkeypatch)
    found = old_log_probs_and_values(rollout, sequences, mask, roles, config)
    assert sum(seen) == len(PROMPTS)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_the_samplers_log_probs_may_stand_for_the_old_ones(build, monkeypatch):
    roles, config = build(rollout__reuse_log_probs=True, advantage__estimator="rloo")
    rollout = sample(roles.actor.model, PROMPTS)
    mask = rollout.response_mask.clone()
    mask[0, 1] = False
    seen = passes(roles, monkeypatch)
    old, _, _ = old_log_probs_and_values(rollout, join(rollout), mask, roles, config)
    assert not seen
    assert torch.equal(old[mask], rollout.rollout_log_probs[mask])
    assert not old[~mask].any()


def test_without_a_tether_the_reference_costs_no_pass(build, monkeypatch):
    """An iteration of one epoch reads old log-probs once and trains once: two passes of 8 rows,
    beside those of the sampler, which begin at the prompts."""
    roles, config = build(
        kl__in_reward__coef=0.0,
        advantage__estimator="rloo",
        actor__epochs=1,
        actor__minibatch_rows=8,
        rollout__prompts=4,
        rollout__samples_per_prompt=2,
    )
    whole = []
    forward = roles.actor.model.model.forward

    def counted(*arguments, **named):
        if "past_key_values" not in named:
            whole.append(len(named["input_ids"]))
        return forward(*arguments, **named)

    monkeypatch.setattr(roles.actor.model.model, "forward", counted)
    run_iteration(0, first_controls(config), roles, config)
    assert sum(whole) == 16
