"""Trap 5 at run time: the check at the start lets a sound run through, and stops others."""

import weakref
from dataclasses import replace

import pytest
import torch
from helpers import table

from tether.errors import RunStopped
from tether.ppo import selfcheck
from tether.ppo.selfcheck import BOUNDS, check_rewards_add_up, check_start, tolerances
from tether.types import Scores


def test_a_sound_run_passes_and_says_what_was_checked(build):
    found = check_start(*build())
    for part in ("ratio 1", "sampler = trainer", "KL to reference 0", "rewards"):
        assert part in found


def shifted_sampler(roles, shift):
    """The same sampler, whose log-probs are off by `shift`, a number or one per column."""

    class Shifted:
        def sync(self, weights, version):
            roles.sampler.sync(weights, version)

        def run(self, episodes, choice, numbers=None):
            rollout = roles.sampler.run(episodes, choice)
            log_probs = rollout.rollout_log_probs
            if isinstance(shift, torch.Tensor):
                return replace(rollout, rollout_log_probs=log_probs + shift[: log_probs.shape[1]])
            return replace(rollout, rollout_log_probs=log_probs + shift)

    return replace(roles, sampler=Shifted())


@pytest.mark.parametrize("shift", [1e-3, float("nan")])
def test_a_sampler_that_disagrees_with_the_training_forward_stops_the_run(build, shift):
    roles, config = build()
    with pytest.raises(RunStopped, match="sampler and training forward"):
        check_start(shifted_sampler(roles, shift), config)


def test_bounds_grow_with_the_depth_and_with_what_a_repeat_measures(build, monkeypatch):
    assert tolerances("float32", 8, 0.0) == tolerances("float32", 2, 1e-6) == BOUNDS["float32"]
    deep, repeated = tolerances("float32", 32, 0.0), tolerances("float32", 8, 2e-5)
    assert [deep.ratio, deep.sampler, deep.mean] == pytest.approx([4e-5, 4e-4, 4e-4])
    assert [repeated.ratio, repeated.sampler] == pytest.approx([8e-5, 8e-4])
    assert tolerances("float32", 8, 1.0).ratio == pytest.approx(1e-4)  # a mistake, not rounding
    assert tolerances("bfloat16", 80, 1.0) == BOUNDS["bfloat16"]
    roles, config = build()
    spread = shifted_sampler(roles, 5e-4)
    with pytest.raises(RunStopped, match=r"differ by up to 0\.0005.* more than 0\.0001 or 0\.0001"):
        check_start(spread, config)
    monkeypatch.setattr(selfcheck, "_repeat_gap", lambda *rows: 1e-4)
    assert "sampler = trainer" in check_start(spread, config)


BFLOAT16 = [
    {"model__compute": "bfloat16"},
    {"model__dtype": "bfloat16", "model__lora": {}, "model__critic_dtype": "float32"},
]


@pytest.mark.parametrize("fields", BFLOAT16)
def test_bfloat16_has_wide_bounds_but_bounds(build, fields):
    """1 for a token and 0.1 for the mean: a shift of all by 0.02 is within both."""
    roles, config = build(**fields)
    assert "sampler = trainer" in check_start(shifted_sampler(roles, 0.02), config)
    for shift in (0.2, 10.0, float("nan")):
        with pytest.raises(RunStopped, match="in bfloat16 sampler and training forward differ"):
            check_start(shifted_sampler(roles, shift), config)


def test_one_token_far_off_stops_a_run_in_bfloat16(build):
    roles, config = build(model__compute="bfloat16")
    shift = torch.tensor([1.2] + [0.0] * 1000)
    with pytest.raises(RunStopped, match=r"up to 1\.\d+ and .* on average, more than 1 or 0\.1"):
        check_start(shifted_sampler(roles, shift), config)


def spoil_reference(roles) -> None:
    with torch.no_grad():
        roles.reference.policy.model.model.norm.weight.mul_(1.01)


def test_a_reference_that_is_not_the_actor_as_configured_stops_the_run(build):
    roles, config = build()
    spoil_reference(roles)
    with pytest.raises(RunStopped, match="KL to an equal reference is not 0"):
        check_start(roles, config)


def test_a_reference_that_is_meant_to_differ_may_differ(build, tmp_path):
    roles, config = build()
    spoil_reference(roles)
    apart = config.model.model_copy(update={"reference": str(tmp_path)})
    assert (
        "KL" not in check_start(roles, config.model_copy(update={"model": apart})).split("rew")[0]
    )


def test_dropout_stops_the_run(build):
    """Trap 6: two forwards of the same weights then differ."""
    roles, config = build()
    for module in roles.actor.model.train().modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    with pytest.raises(RunStopped, match="first ratio is not 1"):
        check_start(roles, config)


@table("error", [0.01, float("nan")])
def test_token_rewards_that_do_not_add_up_stop_the_run(error):
    """Trap 8."""
    scored = torch.tensor([True, False])
    scores = Scores(torch.tensor([1.0, 5.0]), scored, scored)
    kl = torch.tensor([[0.1, 0.2], [0.0, 0.0]])
    rewards = torch.tensor([[-0.01, 0.98], [0.0, 0.0]])
    check_rewards_add_up(rewards, scores, kl, 0.1)
    rewards[0, 0] += error
    with pytest.raises(RunStopped, match="Token rewards"):
        check_rewards_add_up(rewards, scores, kl, 0.1)


def test_the_check_keeps_no_more_for_a_backward_pass_than_an_update_does(build, monkeypatch):
    """The plan of `tether check` knows the updates' microbatches only."""
    roles, config = build(actor__minibatch_rows=2, actor__microbatch_tokens=10_000)
    alive, at_start, rows = weakref.WeakSet(), [], []
    states = roles.actor.states

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor.detach()  # an output with its graph would keep itself alive

    def keep(tensor):
        kept = Kept(tensor)
        alive.add(kept)
        return kept

    def watched(sequences):
        if torch.is_grad_enabled():
            at_start.append(len(alive))
            rows.append(len(sequences.ids))
        return states(sequences)

    monkeypatch.setattr(roles.actor, "states", watched)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
        check_start(roles, config)
    assert max(rows) == 2
    assert len(rows) > 1
    assert at_start == [0] * len(rows)
