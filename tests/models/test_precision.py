"""Mixed precision: products in bfloat16 against float64 ones of rounded numbers, whole models
against float64 models, and what stays in float32."""

import copy

import pytest
import torch
from helpers import mask_of, read_out, sample, sequences_of, table, tiny_llama
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tether
from models.families import FAMILIES, make_family
from models.test_families import ROWS
from tether.config import LoraSection
from tether.data.batching import join
from tether.data.messages import render_prompt
from tether.models import precision
from tether.models.critic import Critic
from tether.models.forward import output_head, recompute_in_backward
from tether.models.loading import load_causal_lm
from tether.models.lora import adapter_off, add_adapter
from tether.models.packed_weights import packed_weights
from tether.models.policy import Policy
from tether.models.precision import Bfloat16Linear, compute_in
from tether.models.token_log_probs import tempered_logits
from tether.models.vocabulary import load_vocabulary
from tether.ppo.optimizer import Optimizer
from tether.run.checkpoint_store import latest_checkpoint

CPU = torch.device("cpu")
FEW = ("smollm2", "qwen2-window", "gpt2")
HALF_BIT = 2**-8  # of a bfloat16 number's size: its last bit is 2^-7 of it, a rounding half of that
# Log-probs of these models in bfloat16 against float32; docs/performance.md says so.
BOUND = 0.1


@pytest.fixture(params=["in float32", "by instructions"])
def _either_way(request, monkeypatch):
    """Products as they are computed with and without instructions for bfloat16."""
    monkeypatch.setattr(precision, "NATIVE", request.param == "by instructions")


def rounded(x):
    """The nearest bfloat16 numbers, in float64: 8 significant bits, ties to even."""
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp((mantissa * 256).round(), exponent - 8)


def matrices(*shapes):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def close(found, expected, error=HALF_BIT):
    """Equal but for one rounding of the result, and float32 sums."""
    torch.testing.assert_close(found.double(), expected, rtol=error * 1.01, atol=1e-5)


def in_bfloat16(model):
    compute_in(model, "bfloat16")
    return model


def test_rounding_by_hand_is_torch_s_own():
    (x,) = matrices((1000,))
    assert torch.equal(rounded(x), x.bfloat16().double())


@pytest.mark.usefixtures("_either_way")
def test_a_layer_multiplies_rounded_numbers_and_rounds_the_result():
    x, g = matrices((2, 3, 24), (2, 3, 40))
    layer = nn.Linear(24, 40)
    layer.__class__ = Bfloat16Linear
    x.requires_grad_()
    found = layer(x)
    assert found.dtype == torch.bfloat16
    a, w, b = rounded(x.detach()), rounded(layer.weight.detach()), rounded(layer.bias.detach())
    close(found, a @ w.T + b)

    found.backward(g.bfloat16())
    g = rounded(g)
    close(x.grad, g @ w)
    close(layer.weight.grad, g.flatten(0, 1).T @ a.flatten(0, 1))
    close(layer.bias.grad, g.flatten(0, 1).sum(dim=0), 1e-5)
    assert {x.grad.dtype, layer.weight.grad.dtype, layer.bias.grad.dtype} == {torch.float32}


@pytest.mark.usefixtures("_either_way")
def test_log_softmax_and_entropy_are_in_float32_after_a_product_in_bfloat16():
    states, weight = matrices((7, 24), (90, 24))
    head = nn.Linear(24, 90, bias=False)
    head.weight.data = weight
    head.__class__ = Bfloat16Linear
    logits = tempered_logits(head, states, 0.5)
    assert logits.dtype == torch.float32
    close(logits, 2 * rounded(states) @ rounded(weight).T)

    model = in_bfloat16(make_family("smollm2"))
    sequences = sequences_of(ROWS)
    mask = mask_of(sequences)
    policy = Policy(model, 0.5, 1000)
    found = read_out(policy, sequences, mask)
    logits = tempered_logits(output_head(model), policy.states(sequences)[mask], 0.5)
    p = torch.softmax(logits.double(), dim=-1)
    expected = p.gather(1, sequences.response_ids[mask][:, None]).log().squeeze(1)
    close(found[0][mask].detach(), expected, 1e-5)
    close(found[1][mask].detach(), -(p * p.log()).sum(dim=-1), 1e-5)


def gradients(model, rows=ROWS):
    """Gradients of a weighted sum of log-probs, one long vector in float64, and the log-probs."""
    sequences = sequences_of(rows)
    log_probs, entropies = read_out(Policy(model, 1.0, 10_000), sequences, mask_of(sequences))
    weights = torch.linspace(-1, 1, log_probs.numel(), dtype=torch.float64).view_as(log_probs)
    (weights * log_probs + 0.01 * entropies).sum().backward()
    found = [w.grad.double().flatten() for w in model.parameters() if w.requires_grad]
    return torch.cat(found), log_probs.detach()


def cosine(a, b):
    return float(torch.dot(a, b) / a.norm() / b.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_point_where_those_of_float64_do(family, float64_norms):
    model = make_family(family)
    expected, log_probs = gradients(copy.deepcopy(model).double())
    found, coarse = gradients(in_bfloat16(model))
    assert cosine(found, expected) >= 0.999
    assert {w.grad.dtype for w in model.parameters()} == {torch.float32}
    assert coarse.dtype == torch.float32
    assert 1e-4 < float((coarse - log_probs).abs().max()) < BOUND, "rounded, and no more than that"


def shape_of(vocabulary, width, layers, heads, groups, inner, seed=0):
    """A Llama with random weights, as transformers draws them."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            tie_word_embeddings=True,
        )
    ).eval()


TOY = {"vocabulary": 4096, "width": 128, "layers": 4, "heads": 4, "groups": 4, "inner": 384}
SMOLLM2 = {
    "vocabulary": 49_152,
    "width": 576,
    "layers": 30,
    "heads": 9,
    "groups": 3,
    "inner": 1536,
}


@pytest.mark.parametrize("shape", [TOY, pytest.param(SMOLLM2, marks=pytest.mark.long)])
def test_gradients_of_a_larger_model_point_where_those_of_float64_do(shape, float64_norms):
    model = shape_of(**shape)
    rows = [([7 * i + j for j in range(6)], [11 * i + j for j in range(12)]) for i in range(1, 5)]
    expected, log_probs = gradients(copy.deepcopy(model).double(), rows)
    found, coarse = gradients(in_bfloat16(model), rows)
    assert cosine(found, expected) >= 0.999
    assert float((coarse - log_probs).abs().max()) < BOUND


@pytest.mark.usefixtures("_either_way")
def test_gradients_of_the_starter_point_where_those_of_float64_do():
    """Trained weights attend more sharply than random ones, which multiplies roundings."""
    model = load_causal_lm("tether:starter", "float32", CPU, compute="bfloat16")
    tokenizer = load_vocabulary("tether:starter", model).tokenizer
    questions = [f"{a}+{b}=?" for a, b in ((17, 25), (48, 7), (3, 4), (36, 59), (90, 8))]
    prompts = [render_prompt(tokenizer, question) for question in questions]
    rollout = sample(model, prompts, limit=6)
    rows = [(p, rollout.response_ids[i].tolist()) for i, p in enumerate(prompts)]
    found, coarse = gradients(model, rows)
    expected, log_probs = gradients(load_causal_lm("tether:starter", "float64", CPU), rows)
    assert cosine(found, expected) >= 0.999
    assert float((coarse - log_probs).abs().max()) < BOUND


@table("family", FEW)
def test_recomputing_in_the_backward_pass_changes_no_bit(family):
    model = in_bfloat16(make_family(family))
    plain, log_probs = gradients(model)
    model.zero_grad()
    recompute_in_backward(model)
    again, log_probs_again = gradients(model)
    assert torch.equal(plain, again)
    assert torch.equal(log_probs, log_probs_again)


@table("family", FEW)
def test_the_sampler_decodes_in_bfloat16_and_agrees_up_to_its_rounding(family):
    model = in_bfloat16(make_family(family))
    rollout = sample(model, [list(range(3, 3 + n)) for n in (1, 9, 4, 9)], limit=14, eos_ids=(0,))
    trained = Policy(model, 1.0, 1000).log_probs(join(rollout), rollout.response_mask)
    gap = (trained - rollout.rollout_log_probs)[rollout.response_mask].abs()
    assert float(gap.max()) < BOUND
    assert rollout.rollout_log_probs.dtype == torch.float32


@table(
    ("family", "exact", "coarse"),
    [
        ("llama", ("q_proj", "k_proj", "v_proj"), ("o_proj", "gate_proj", "up_proj", "down_proj")),
        ("gpt2", ("c_attn",), ("c_proj", "c_fc")),
    ],
)
def test_attention_is_in_float32_and_the_other_layers_in_bfloat16(family, exact, coarse):
    model, seen = in_bfloat16(make_family(family)), {}
    for name, module in model.base_model.named_modules():
        last = name.rpartition(".")[2]
        module.register_forward_hook(
            lambda module, inputs, found, last=last: seen.setdefault(last, set()).add(
                found.dtype if torch.is_tensor(found) else None
            )
        )
    sequences = sequences_of(ROWS)
    states = Policy(model, 1.0, 1000).states(sequences)
    assert {name: seen[name] for name in exact} == {name: {torch.float32} for name in exact}
    assert {name: seen[name] for name in coarse} == {name: {torch.bfloat16} for name in coarse}
    assert states.dtype == torch.float32, "the sum that layers add to"


def test_packed_weights_round_as_the_layers_do(monkeypatch):
    monkeypatch.setattr("tether.models.packed_weights.MIN_PACKED_WEIGHTS", 1)
    model = in_bfloat16(make_family("qwen2"))
    layers = output_head(model), model.model.layers[0].mlp.up_proj
    layers[1].bias = nn.Parameter(torch.linspace(-1, 1, 64))
    exact = model.model.layers[0].self_attn.q_proj
    (states,) = matrices((5, 32))
    plain, expected = [layer(states) for layer in layers], exact(states)
    with packed_weights(model):
        packed, found = [layer(states) for layer in layers], exact(states)
    for one, other in zip(plain, packed, strict=True):
        assert other.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-5)  # a bit, by order of sums
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_learns_in_float32_and_its_base_is_the_reference():
    model = in_bfloat16(make_family("smollm2"))
    sequences = sequences_of(ROWS)
    policy = Policy(model, 1.0, 1000)
    before = policy.log_probs(sequences, mask_of(sequences))
    add_adapter(model, LoraSection(rank=4), 0, "actor")
    assert torch.equal(policy.log_probs(sequences, mask_of(sequences)), before)
    gradients(model)
    learning = [w for w in model.parameters() if w.requires_grad]
    assert {w.grad.dtype for w in learning} == {torch.float32}
    Optimizer(learning, 1e-2, 1.0).step()
    assert not torch.equal(policy.log_probs(sequences, mask_of(sequences)), before)
    with adapter_off(model):
        assert torch.equal(policy.log_probs(sequences, mask_of(sequences)), before)


@table("family", FEW)
def test_a_frozen_role_may_be_stored_in_bfloat16(family):
    model = make_family(family)
    stored = in_bfloat16(copy.deepcopy(model).bfloat16())
    sequences = sequences_of(ROWS)
    mask = mask_of(sequences)
    found = Policy(stored, 1.0, 1000).log_probs(sequences, mask)
    expected = Policy(in_bfloat16(model), 1.0, 1000).log_probs(sequences, mask)
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) < BOUND


def test_values_are_computed_in_float32():
    """A head that adds 1 to the 1001st part: bfloat16 would round the sum to 1."""
    critic = Critic(in_bfloat16(tiny_llama(300, 256)).model, 1000)
    states = torch.zeros(1, 2, 32)
    states[..., 0] = 1.001
    nn.init.ones_(critic.head.weight)
    values = critic.values_from_states(states)
    torch.testing.assert_close(values, torch.full((1, 2), 1.001), rtol=1e-6, atol=0)
    assert critic(sequences_of(ROWS)).dtype == torch.float32


def moved_share(run, start):
    after = load_causal_lm(str(latest_checkpoint(run) / "actor"), "float32", CPU).state_dict()
    pairs = [(after[name].float(), weight.float()) for name, weight in start.items()]
    moved = sum(int((a != b).sum()) for a, b in pairs)
    return moved / sum(b.numel() for _, b in pairs)


def test_a_step_of_1e_6_is_lost_in_stored_bfloat16_and_not_in_mixed_precision(
    scored_config, tmp_path
):
    name = scored_config["model"]["actor"]
    shares = {}
    for field in ("dtype", "compute"):
        run = tmp_path / field
        config = {
            **scored_config,
            "run": {"dir": str(run)},
            "model": {"actor": name, field: "bfloat16", "ablation": field == "dtype"},
            "actor": {**scored_config.get("actor", {}), "lr": 1e-6},
            "train": {"iterations": 1},
        }
        tether.train(config, quiet=True)
        dtype = "bfloat16" if field == "dtype" else "float32"
        shares[field] = moved_share(run, load_causal_lm(name, dtype, CPU).state_dict())
        events = (run / "events.jsonl").read_text()
        assert ("lost to rounding" in events) == (field == "dtype")
    assert shares["dtype"] < 0.01
    assert shares["compute"] > 0.9
