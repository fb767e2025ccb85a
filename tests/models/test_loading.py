from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from helpers import mask_of, read_out, sequences_of

from tether.errors import UserError
from tether.models.critic import Critic
from tether.models.loading import Vocabulary, load_causal_lm, load_vocabulary
from tether.models.policy import Policy

CPU = torch.device("cpu")


@pytest.fixture
def model_dir(tmp_path, byte_tokenizer):
    """A function that saves a model, changed as a test wants, and gives its directory."""

    def save(change=lambda model: None) -> str:
        model = tiny_llama(260, 256)
        change(model)
        model.save_pretrained(tmp_path / "model")
        byte_tokenizer.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def test_dropout_is_off_in_actor_and_critic_whatever_the_model_asks_for(model_dir):
    """Trap 6: a forward that gradients flow through repeats itself bit for bit."""

    def forget_half(model):
        model.config.attention_dropout = 0.5

    model = load_causal_lm(model_dir(forget_half), "float32", CPU)
    assert model.config.attention_dropout == 0.5
    policy, critic = Policy(model, 1.0, 1000), Critic(model, 1000)
    torch.nn.init.normal_(critic.head.weight)
    sequences = sequences_of([([1, 2], [3, 4, 5])])
    first, second = (read_out(policy, sequences, mask_of(sequences))[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(critic(sequences), critic(sequences))


def test_all_eos_ids_of_model_and_tokenizer_count(model_dir):
    """Trap 1: several EOS ids."""

    def end_three_ways(model):
        model.generation_config.eos_token_id = [10, 20]

    directory = model_dir(end_three_ways)
    model = load_causal_lm(directory, "float32", CPU)
    assert load_vocabulary(directory, model).eos_ids == {10, 20, 256}


def test_a_final_eos_is_left_out_of_the_text_and_nothing_else_is(byte_tokenizer):
    vocabulary = Vocabulary(byte_tokenizer, frozenset({256}))
    hi = byte_tokenizer("hi").input_ids
    assert vocabulary.decode([*hi, 256]) == "hi"
    assert vocabulary.decode([*hi, 258]) == "hi<|user|>"
    assert vocabulary.decode([256, *hi, 256]) == "<|end|>hi"
    assert vocabulary.decode([]) == ""


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_weights_are_loaded_in_the_type_asked_for(tiny_model_dir, dtype):
    assert load_causal_lm(tiny_model_dir, dtype, CPU).dtype == getattr(torch, dtype)


def test_a_missing_directory_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        load_causal_lm(str(tmp_path / "nowhere"), "float32", CPU)


def test_a_directory_without_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        load_causal_lm(str(tmp_path), "float32", CPU)


def test_a_model_without_safetensors_is_refused(model_dir):
    directory = model_dir()
    Path(directory, "model.safetensors").rename(Path(directory, "pytorch_model.bin"))
    with pytest.raises(UserError, match="does not load"):
        load_causal_lm(directory, "float32", CPU)


def test_nan_weights_are_refused(model_dir):
    def spoil(model):
        model.model.norm.weight.data[3] = torch.nan

    with pytest.raises(UserError, match="NaN"):
        load_causal_lm(model_dir(spoil), "float32", CPU)
