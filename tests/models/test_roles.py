"""What critic and reference add to the actor's weights, and what a checkpoint restores of them."""

import pytest
import torch
from helpers import mask_of, sequences_of, tiny_llama

from tether.models.critic import Critic, NoCritic
from tether.models.policy import AdapterOffReference, FrozenReference, NoReference, Policy

ROWS = sequences_of([([5, 9, 200], [7, 8, 256]), ([1], [2, 3])])


def test_a_critic_on_the_actors_trunk_adds_its_head_alone():
    model = tiny_llama(260, 256)
    own, shared = Critic(model, 100), Critic(model, 100, shared_trunk=True)
    [whole], [head] = own.networks(), shared.networks()
    assert (whole.module, whole.trunk) == (own, model.model)
    assert (head.module, head.trunk) == (shared.head, None)


def test_roles_without_weights_of_their_own_have_nothing_to_shard_or_save():
    actor = Policy(tiny_llama(260, 256), 1.0, 100)
    for role in (NoCritic(), NoReference(), AdapterOffReference(actor)):
        assert role.networks() == []
        assert role.state() == {}


def test_without_a_critic_all_values_are_0():
    none, states = NoCritic(), torch.ones(2, 4, 32)
    assert torch.equal(none(ROWS), torch.zeros(2, 4))  # 3 response tokens, and after the last
    assert torch.equal(none.values_from_states(states), torch.zeros(2, 4))


def test_without_a_reference_the_kl_is_0():
    actor, mask = Policy(tiny_llama(260, 256), 1.0, 100), mask_of(ROWS)
    old = actor.log_probs(ROWS, mask)
    assert torch.equal(NoReference().log_probs(ROWS, mask, old), old)
    kl = NoReference().full_kl(actor, actor.states(ROWS), ROWS, mask)
    assert torch.equal(kl, torch.zeros(2, 3))


def test_a_reference_is_saved_only_if_it_is_refreshed_and_comes_back_as_it_was():
    actor, mask = Policy(tiny_llama(260, 256), 1.0, 100), mask_of(ROWS)
    assert FrozenReference(actor.snapshot().model, 1.0, 100).state() == {}
    reference = FrozenReference(actor.snapshot().model, 1.0, 100, refreshed=True)
    with torch.no_grad():
        actor.model.lm_head.weight.mul_(2)
    reference.refresh(actor)
    saved = {name: tensor.clone() for name, tensor in reference.state().items()}
    fresh = FrozenReference(tiny_llama(260, 256), 1.0, 100, refreshed=True)
    fresh.load_state(saved)
    old = actor.log_probs(ROWS, mask)
    assert torch.equal(fresh.log_probs(ROWS, mask, old), old)


def test_the_base_below_an_adapter_is_never_refreshed():
    actor = Policy(tiny_llama(260, 256), 1.0, 100)
    with pytest.raises(NotImplementedError, match="cannot be refreshed"):
        AdapterOffReference(actor).refresh(actor)
