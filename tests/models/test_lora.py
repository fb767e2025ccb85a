"""LoRA against matrices added by hand, and the base below it against a model of its own."""

import copy

import numpy as np
import pytest
import torch
from helpers import mask_of, read_out, sequences_of, slow_log_probs, tiny_llama
from transformers.pytorch_utils import Conv1D

from models.families import FAMILIES, make_family
from tether.config import LoraSection
from tether.errors import UserError
from tether.models.critic import Critic
from tether.models.lora import add_adapter, merge_adapter
from tether.models.policy import AdapterOffReference, FrozenReference, Policy
from tether.models.weights import load_trainable_parameters, trainable_parameters

ROWS = [([5, 9, 200], [7, 8, 256]), ([1], [2, 3, 4, 5, 6, 7]), (list(range(11, 18)), [18])]
every_family = pytest.mark.parametrize("family", FAMILIES)


def adapted(model, rank=4, alpha=12.0, targets=None, seed=3):
    add_adapter(model, LoraSection(rank=rank, alpha=alpha, targets=targets), seed, "actor")
    return model


def moved(model):
    """As after some training: B is no longer zero."""
    generator = torch.Generator().manual_seed(5)
    for name, weight in trainable_parameters(model).items():
        if "lora_B" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator).to(weight)
    return model


def batch():
    sequences = sequences_of(ROWS)
    return sequences, mask_of(sequences)


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_adapter_changes_no_bit_so_the_kl_is_exactly_0(family, dtype):
    plain = make_family(family).to(dtype)
    actor = Policy(adapted(copy.deepcopy(plain)), 0.7, 20)
    sequences, mask = batch()
    old = actor.log_probs(sequences, mask)
    assert torch.equal(AdapterOffReference(actor).log_probs(sequences, mask, old), old)
    assert torch.equal(Policy(plain, 0.7, 20).log_probs(sequences, mask), old)


@every_family
def test_the_reference_stays_the_base_bit_for_bit_while_the_adapter_learns(family):
    plain = make_family(family)
    actor = Policy(moved(adapted(copy.deepcopy(plain))), 1.0, 1000)
    sequences, mask = batch()
    old = actor.log_probs(sequences, mask)
    ref = AdapterOffReference(actor).log_probs(sequences, mask, old)
    assert torch.equal(ref, Policy(plain, 1.0, 1000).log_probs(sequences, mask))
    assert (old - ref).abs().max() > 0.01
    assert torch.equal(actor.log_probs(sequences, mask), old), "and the adapter is on again"


def with_matrices_added(plain, model, alpha, rank):
    """The plain model with alpha/rank x B A added to every adapted weight, in plain numpy."""
    weights = dict(plain.named_parameters())
    for name, a in trainable_parameters(model).items():
        if "lora_A" not in name:
            continue
        b = trainable_parameters(model)[name.replace("lora_A", "lora_B")]
        delta = alpha / rank * (b.detach().numpy() @ a.detach().numpy())
        owner = name.partition(".lora_A")[0]
        target = weights[f"{owner}.weight"]
        if isinstance(plain.get_submodule(owner), Conv1D):
            delta = delta.T
        target.data += torch.from_numpy(np.ascontiguousarray(delta))
    return plain


@every_family
def test_an_adapter_is_alpha_over_rank_times_b_a_beside_each_linear_layer(family):
    plain = make_family(family)
    model = moved(adapted(copy.deepcopy(plain), rank=4, alpha=12.0))
    by_hand = with_matrices_added(plain, model, alpha=12.0, rank=4)
    found = Policy(model, 1.0, 1000).log_probs(*batch())
    merge_adapter(model)
    merged = Policy(model, 1.0, 1000).log_probs(*batch())
    for row, (prompt, ids) in enumerate(ROWS):
        expected = slow_log_probs(by_hand, prompt, ids)
        torch.testing.assert_close(found[row, : len(ids)], expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(merged[row, : len(ids)], expected, rtol=0, atol=2e-5)


@every_family
def test_merging_leaves_a_plain_model_of_the_same_weights_names(family):
    plain = make_family(family)
    model = moved(adapted(copy.deepcopy(plain)))
    merge_adapter(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == model.config.tie_word_embeddings


@every_family
def test_only_the_matrices_learn_and_none_is_on_the_head(family):
    model = adapted(make_family(family))
    names = list(trainable_parameters(model))
    assert names
    assert all("lora_" in name for name in names)
    assert all(name.startswith(f"{model.base_model_prefix}.") for name in names)
    linear = [m for m in model.modules() if hasattr(m, "lora_A")]
    assert len(names) == 2 * len(linear)


def test_targets_pick_layers_by_name_and_a_wrong_name_is_refused_with_the_right_ones():
    model = adapted(make_family("llama"), targets=["q_proj", "v_proj"])
    owners = {
        name.partition(".lora_")[0].rpartition(".")[2] for name in trainable_parameters(model)
    }
    assert owners == {"q_proj", "v_proj"}
    with pytest.raises(UserError, match=r"model\.lora\.targets names 'qproj'.* q_proj, up_proj"):
        adapted(make_family("llama"), targets=["qproj"])
    with pytest.raises(UserError, match="lm_head"):
        adapted(make_family("llama"), targets=["lm_head"])


def test_the_matrices_are_computed_from_the_seed_and_from_nothing_else():
    torch.manual_seed(1)
    first = trainable_parameters(adapted(tiny_llama(260, 256), seed=3))
    torch.manual_seed(2)
    torch.rand(5)
    second = trainable_parameters(adapted(tiny_llama(260, 256), seed=3))
    other = trainable_parameters(adapted(tiny_llama(260, 256), seed=4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    a = [name for name in first if "lora_A" in name]
    assert not any(torch.equal(first[name], other[name]) for name in a)
    assert not torch.equal(first[a[0]], first[a[1]])
    bound = 32**-0.5
    values = first[a[0]].abs()
    assert 0.8 * bound < values.max() <= bound
    assert not any(bool(first[name].any()) for name in first if "lora_B" in name)


def test_matrices_on_a_bfloat16_base_are_float32():
    model = adapted(make_family("llama").bfloat16())
    assert {weight.dtype for weight in trainable_parameters(model).values()} == {torch.float32}
    assert model.dtype == torch.bfloat16


def unique_bytes(*modules) -> int:
    weights = [w for module in modules for w in (*module.parameters(), *module.buffers())]
    return sum(
        {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}.values()
    )


def test_actor_and_reference_take_less_than_60_percent_of_two_copies():
    plain = make_family("smollm2")
    two = unique_bytes(plain, copy.deepcopy(plain))
    actor = Policy(adapted(plain, rank=2), 1.0, 1000)
    assert unique_bytes(actor.model, AdapterOffReference(actor).actor.model) < 0.6 * two


def test_a_snapshot_shares_the_base_and_keeps_the_adapter():
    actor = Policy(moved(adapted(make_family("smollm2"), rank=2)), 1.0, 1000)
    sequences, mask = batch()
    before = actor.log_probs(sequences, mask)
    alone = unique_bytes(actor.model)
    snapshot = actor.snapshot()
    extra = sum(weight.nbytes for weight in trainable_parameters(actor.model).values())
    assert unique_bytes(actor.model, snapshot.model) <= alone + extra + 1000
    for weight in trainable_parameters(actor.model).values():
        weight.data.mul_(3)
    assert torch.equal(snapshot.log_probs(sequences, mask), before)
    assert not torch.equal(actor.log_probs(sequences, mask), before)


def test_full_kl_and_its_gradient_are_those_of_a_reference_of_its_own():
    plain = make_family("qwen2").double()
    model = moved(adapted(copy.deepcopy(plain)))
    actor = Policy(model, 0.8, 1000)
    sequences, mask = batch()

    def measured(reference):
        states = actor.states(sequences)
        kl = reference.full_kl(actor, states, sequences, mask)
        gradients = torch.autograd.grad(kl.sum(), list(trainable_parameters(model).values()))
        return [kl.detach(), *gradients]

    shared = measured(AdapterOffReference(actor))
    apart = measured(FrozenReference(plain, 0.8, 1000))
    assert float(shared[0].sum()) > 0.01
    assert all(bool(gradient.any()) for gradient in shared[1:])
    for one, other in zip(shared, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_gradient_reaches_the_matrices_through_a_pass_with_the_adapter_off():
    """The reference may be read between an update's forward and its backward."""
    model = moved(adapted(make_family("llama")))
    actor = Policy(model, 1.0, 1000)
    sequences, mask = batch()

    def gradients(between):
        log_probs, _ = read_out(actor, sequences, mask)
        between(log_probs)
        log_probs.sum().backward()
        found = [weight.grad.clone() for weight in trainable_parameters(model).values()]
        model.zero_grad(set_to_none=True)
        return found

    reference = AdapterOffReference(actor)
    plain = gradients(lambda log_probs: None)
    found = gradients(lambda log_probs: reference.log_probs(sequences, mask, log_probs.detach()))
    assert len(plain) == len(found) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_the_critics_head_learns_beside_its_adapter():
    model = tiny_llama(260, 256)
    add_adapter(model, LoraSection(rank=2), 0, "critic")
    critic = Critic(model, 1000)
    names = trainable_parameters(critic)
    assert {"head.weight", "head.bias"} <= set(names)
    assert all("lora_" in name or name.startswith("head.") for name in names)
    saved = {name: torch.randn_like(weight) for name, weight in names.items()}
    load_trainable_parameters(critic, saved)
    assert all(
        torch.equal(weight, saved[name]) for name, weight in trainable_parameters(critic).items()
    )


def test_weights_that_do_not_belong_are_not_loaded():
    model = adapted(make_family("llama"), targets=["q_proj"])
    other = trainable_parameters(adapted(make_family("llama"), targets=["k_proj"]))
    with pytest.raises(RuntimeError, match="others than those saved"):
        load_trainable_parameters(model, other)
