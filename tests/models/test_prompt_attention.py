"""Packed rows have the states and gradients that they have alone, in every family that can."""

from dataclasses import replace

import pytest
import torch
from helpers import sequences_of, table
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BloomConfig, BloomForCausalLM, OPTConfig, OPTForCausalLM

from models.families import FAMILIES, make_family
from tether.config import LoraSection
from tether.data import shared_prompts
from tether.models.forward import (
    can_pack_prompts,
    recompute_in_backward,
    states_before_tokens,
    trunk,
)
from tether.models.lora import add_adapter

STATES = 1e-6
# The plain float32 gradient of this loss differs by up to 1.6e-6 from the float64 one.
GRADIENTS = 4e-6
WINDOWED = ("qwen2-window", "mistral")  # these see four tokens back
ROWS = [
    ([5, 9, 20], [7, 8]),
    ([1, 2, 3, 4, 5], [9]),
    ([5, 9, 20], [7, 8, 3, 4, 5]),
    ([11], [12, 13]),  # alone
    ([5, 9, 20], [1]),
    ([1, 2, 3, 4, 5], [2, 2, 2]),
]
SMALL = {
    **{"vocab_size": 50, "hidden_size": 32, "max_position_embeddings": 64, "ffn_dim": 32},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 32},
}


@pytest.fixture(autouse=True)
def _always_packed(monkeypatch):
    """Pack rows that are too few for it to pay."""
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_TOKENS", 1)
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_SHARE", 0.0)


def states_and_gradients(model, sequences, share: bool):
    """The states that count, and every gradient of a loss that weighs each number differently."""
    model.zero_grad()
    states = states_before_tokens(trunk(model), replace(sequences, share_prompts=share))
    used = torch.arange(states.shape[1]) <= sequences.response_lengths[:, None]
    numbers = states[used]
    weights = torch.linspace(-1, 1, numbers.numel(), dtype=numbers.dtype).view_as(numbers)
    (numbers * weights).pow(2).sum().backward()
    gradients = [w.grad for w in model.parameters() if w.grad is not None]
    return numbers.detach(), torch.cat([g.reshape(-1) for g in gradients])


def assert_packing_changes_nothing(
    model, sequences, of_states: float = STATES, of_gradients: float = GRADIENTS
) -> None:
    plain, slopes = states_and_gradients(model, sequences, share=False)
    packed, packed_slopes = states_and_gradients(model, sequences, share=True)
    assert float((packed - plain).abs().max()) <= of_states * float(plain.abs().max())
    assert float((packed_slopes - slopes).norm()) <= of_gradients * float(slopes.norm())
    assert float(slopes.norm()) > 1e-3


@table("name", [name for name in FAMILIES if name not in WINDOWED])
def test_packed_rows_have_the_states_and_gradients_of_rows_alone(name):
    assert_packing_changes_nothing(make_family(name), sequences_of(ROWS))


def test_in_float64_they_agree_to_12_digits():
    """GPT-2, whose norms do not round to float32."""
    assert_packing_changes_nothing(make_family("gpt2").double(), sequences_of(ROWS), 1e-12, 1e-12)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 99), min_size=1, max_size=6)),
        min_size=1,
        max_size=8,
    ),
    st.lists(st.integers(1, 7), min_size=4, max_size=4),
)
def test_any_prompts_and_lengths_agree(rows, prompt_lengths):
    prompts = [list(range(i, i + length)) for i, length in enumerate(prompt_lengths)]
    sequences = sequences_of([(prompts[number], response) for number, response in rows])
    model = make_family("gpt2").double()
    assert_packing_changes_nothing(model, sequences, 1e-12, 1e-12)


def test_recomputed_layers_attend_as_they_did():
    model = make_family("smollm2")
    _, plain = states_and_gradients(model, sequences_of(ROWS), share=True)
    recompute_in_backward(model)
    _, recomputed = states_and_gradients(model, sequences_of(ROWS), share=True)
    torch.testing.assert_close(recomputed, plain)
    assert model.config._attn_implementation == "sdpa"
    assert_packing_changes_nothing(model, sequences_of(ROWS))


def test_adapters_have_the_gradients_of_rows_alone():
    model = make_family("llama").requires_grad_(False)
    add_adapter(model, LoraSection(rank=2), 0, "actor")
    torch.manual_seed(3)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # these start at 0
            torch.nn.init.normal_(weight, std=0.1)
    assert_packing_changes_nothing(model, sequences_of(ROWS))


def test_packing_is_refused_where_tokens_depend_on_more_than_attention_and_position():
    for name in FAMILIES:
        model = trunk(make_family(name))
        assert can_pack_prompts(model, longest_row=20) == (name not in WINDOWED), name
    # A window as long as any row cuts nothing off.
    wide = trunk(make_family("mistral"))
    wide.config.sliding_window = 20
    assert can_pack_prompts(wide, longest_row=20)
    assert not can_pack_prompts(wide, longest_row=21)
    alibi = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=2))
    assert not can_pack_prompts(trunk(alibi.eval()), longest_row=20)
    assert can_pack_prompts(trunk(OPTForCausalLM(OPTConfig(**SMALL)).eval()), longest_row=20)


def test_a_model_that_takes_no_such_mask_is_read_row_by_row(monkeypatch):
    model = trunk(make_family("llama"))
    monkeypatch.setattr(type(model), "forward", lambda *args, **kwargs: 1 / [])
    assert not can_pack_prompts(model, longest_row=20)
