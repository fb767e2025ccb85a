"""Gradient checkpointing: the same gradients, from a forward that is made twice."""

import pytest
import torch
from helpers import mask_of, read_out, response, sample, sequences_of
from transformers import FalconConfig, FalconForCausalLM, OPTConfig, OPTForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from models.families import FAMILIES, make_family
from tether.models.critic import Critic
from tether.models.forward import recompute_in_backward
from tether.models.policy import Policy

ROWS = [([5, 9, 200], [7, 8, 256]), ([1], [2, 3, 4, 5, 6, 7]), (list(range(11, 18)), [18])]


def layers(model):
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def gradients(policy):
    sequences = sequences_of(ROWS)
    log_probs, entropies = read_out(policy, sequences, mask_of(sequences))
    (log_probs.sum() + entropies.sum()).backward()
    found = [w.grad.clone() for w in policy.model.parameters()]
    policy.model.zero_grad(set_to_none=True)
    return log_probs.detach(), found


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_gradients_are_the_same(family):
    policy = Policy(make_family(family), 1.0, 1000)
    log_probs, plain = gradients(policy)
    recompute_in_backward(policy.model)
    again, recomputed = gradients(policy)
    assert torch.equal(log_probs, again)
    for one, other in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_runs_again_in_the_backward_pass_and_only_there(family):
    model = make_family(family)
    recompute_in_backward(model)
    calls = []
    for layer in layers(model):
        layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    gradients(Policy(model, 1.0, 1000))
    assert len(calls) == 2 * len(layers(model)) == 6
    calls.clear()
    sequences = sequences_of(ROWS)
    Policy(model, 1.0, 1000).log_probs(sequences, mask_of(sequences))
    assert calls == [False] * 3


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_sampling_is_not_touched_by_it(family):
    model = make_family(family)
    prompts = [[1, 2, 3], [4], [5, 6]]
    before = sample(model, prompts, limit=6)
    recompute_in_backward(model)
    gradients(Policy(model, 1.0, 1000))
    after = sample(model, prompts, limit=6)
    assert [response(before, i) for i in range(3)] == [response(after, i) for i in range(3)]
    assert torch.equal(before.rollout_log_probs, after.rollout_log_probs)


def test_dropout_stays_off():
    model = make_family("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    policy = Policy(model, 1.0, 1000)
    log_probs, plain = gradients(policy)
    recompute_in_backward(model)
    again, recomputed = gradients(policy)
    assert torch.equal(log_probs, again)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_less_is_kept_between_forward_and_backward():
    model = make_family("llama")
    sequences = sequences_of(ROWS)

    def kept():
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = {w.untyped_storage().data_ptr() for w in model.parameters()}
        critic = Critic(model, 1000)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            critic(sequences)
        return sum(size for place, size in sizes.items() if place not in weights)

    plain = kept()
    recompute_in_backward(model)
    assert kept() < 0.5 * plain


OPT = OPTConfig(
    vocab_size=300,
    hidden_size=32,
    ffn_dim=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    word_embed_proj_dim=32,
    max_position_embeddings=64,
    dropout=0.5,
    init_std=0.2,
)
FALCON = FalconConfig(
    vocab_size=300,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    hidden_dropout=0.5,
    attention_dropout=0.5,
    initializer_range=0.2,
)


@pytest.mark.parametrize(
    ("kind", "config"), [(OPTForCausalLM, OPT), (FalconForCausalLM, FALCON)], ids=["opt", "falcon"]
)
def test_dropout_stays_off_where_the_layer_itself_is_asked(kind, config):
    """Their layers hand their own training flag to functional dropout."""
    torch.manual_seed(0)
    policy = Policy(kind(config).eval(), 1.0, 1000)
    log_probs, plain = gradients(policy)
    recompute_in_backward(policy.model)
    again, recomputed = gradients(policy)
    assert torch.equal(log_probs, again)
    for one, other in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
