"""A config.json is a stranger's: absurd sizes cost a sentence, no time and no memory."""

import json
import shutil
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from tether.errors import UserError
from tether.models.loading import load_causal_lm, load_on_meta
from tether.models.reward_model import load_reward_model
from tether.models.vocabulary import load_vocabulary_without_model

CPU = torch.device("cpu")


@pytest.fixture
def spoil(tiny_model_dir, tmp_path):
    """A function that copies the tiny model with other values in one of its JSON files."""

    def copy(file: str, **changes: object) -> str:
        directory = tmp_path / "model"
        shutil.copytree(tiny_model_dir, directory)
        content = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps({**content, **changes}))
        return str(directory)

    return copy


def tries(name: str):
    """Every way in which a model directory is opened."""
    yield lambda: load_causal_lm(name, "float32", CPU)
    yield lambda: load_on_meta(AutoModelForCausalLM, name, "float32")
    yield lambda: load_reward_model(name, "float32", CPU, 1000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 1_000_000),
        ("num_hidden_layers", -1),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("num_attention_heads", "two"),
        ("hidden_size", "32"),
        ("vocab_size", 10**12),
        ("max_position_embeddings", 1.5),
    ],
)
def test_an_impossible_size_is_refused_by_its_name_at_once(spoil, field, value):
    name = spoil("config.json", **{field: value})
    began = time.monotonic()
    for load in tries(name):
        with pytest.raises(UserError, match=rf"says {field} = .*config\.json; it must be a whole"):
            load()
    assert time.monotonic() - began < 2


def test_a_size_in_a_part_of_the_config_counts_as_well(spoil):
    name = spoil("config.json", text_config={"num_hidden_layers": 10**6})
    with pytest.raises(UserError, match="num_hidden_layers = 1000000"):
        load_causal_lm(name, "float32", CPU)


def test_more_weights_than_the_files_hold_are_not_made_up(spoil):
    """50 layers of 96 million weights are 19 GB; the directory holds 100 kB."""
    name = spoil("config.json", num_hidden_layers=50, intermediate_size=1_000_000)
    with pytest.raises(UserError, match=r"has 4,\d{3},\d{3}\S* weights by its config\.json, but"):
        load_causal_lm(name, "float32", CPU)


def test_whatever_transformers_raises_over_a_config_is_one_sentence(spoil):
    name = spoil("config.json", rope_parameters={"rope_type": "default", "rope_theta": "x"})
    for load in tries(name):
        with pytest.raises(UserError, match=r"^\S*model [^\n]+$"):
            load()


@pytest.mark.parametrize("eos", ["x", -1, {"a": 1}, ["x"], [[1]], 1.5, True])
def test_an_eos_that_is_no_id_is_refused_by_its_name(spoil, eos):
    name = spoil("generation_config.json", eos_token_id=eos)
    with pytest.raises(UserError, match="as an EOS token; eos_token_id in its generation_config"):
        load_vocabulary_without_model(name)
