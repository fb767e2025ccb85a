import copy
import json
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from helpers import mask_of, read_out, sequences_of, tiny_llama
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForSequenceClassification

from tether.errors import UserError
from tether.models import locate
from tether.models.critic import Critic
from tether.models.loading import load_causal_lm, load_trunk
from tether.models.policy import Policy
from tether.models.vocabulary import Vocabulary, load_vocabulary

CPU = torch.device("cpu")
FORMAT = {"format": "pt"}


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
    with pytest.raises(UserError, match=r"pytorch_model\.bin, a pickle.*convert it to safetensors"):
        load_causal_lm(directory, "float32", CPU)


def rewrite(directory, file, **fields):
    path = Path(directory, file)
    written = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**written, **fields}))


def test_a_model_or_tokenizer_that_brings_code_is_refused_and_none_of_it_runs(model_dir, tmp_path):
    directory = model_dir()
    ran = tmp_path / "ran"
    Path(directory, "theirs.py").write_text(f"open({str(ran)!r}, 'w')")
    rewrite(
        directory,
        "tokenizer_config.json",
        tokenizer_class="Theirs",
        auto_map={"AutoTokenizer": ["theirs.Theirs", None]},
    )
    model = load_causal_lm(directory, "float32", CPU)
    with pytest.raises(UserError, match="Python code of its own, which tether never runs"):
        load_vocabulary(directory, model)
    rewrite(
        directory,
        "config.json",
        model_type="theirs",
        auto_map={"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"},
    )
    with pytest.raises(UserError, match="Python code of its own, which tether never runs"):
        load_causal_lm(directory, "float32", CPU)
    assert not ran.exists()


def test_an_adapter_directory_never_leads_to_the_base_that_it_names(model_dir, tiny_model_dir):
    directory = model_dir()
    rewrite(directory, "adapter_config.json", base_model_name_or_path=tiny_model_dir)
    with pytest.raises(UserError, match="an adapter, not a model; merge it"):
        load_causal_lm(directory, "float32", CPU)


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(model_dir, byte_tokenizer):
    directory = model_dir()
    larger = copy.deepcopy(byte_tokenizer)
    larger.add_tokens(["<|more|>"])
    larger.save_pretrained(directory)
    model = load_causal_lm(directory, "float32", CPU)
    with pytest.raises(UserError, match="ids up to 260, but its embedding only 260 rows"):
        load_vocabulary(directory, model)


def test_a_model_that_lacks_weights_is_refused_instead_of_made_up(tmp_path):
    """transformers fills what is missing at random."""
    model = LlamaForSequenceClassification(tiny_llama(260, 256).config)
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"holds no lm_head\.weight"):
        load_causal_lm(str(tmp_path), "float32", CPU)


def test_a_trunk_is_read_from_any_model_that_has_one(model_dir, tmp_path):
    classifier = LlamaForSequenceClassification(tiny_llama(260, 256).config)
    classifier.save_pretrained(tmp_path / "classifier")
    for directory, source in (
        (model_dir(), tiny_llama(260, 256)),
        (str(tmp_path / "classifier"), classifier),
    ):
        trunk = load_trunk(directory, "float32", CPU)
        expected = source.model.state_dict()
        assert all(torch.equal(x, expected[name]) for name, x in trunk.state_dict().items())
        assert len(trunk.state_dict()) == len(expected)


def test_logits_that_are_more_than_the_head_are_refused(tmp_path):
    """Gemma 2 caps them: its log-probs would be wrong without a word."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 50}
    config = Gemma2Config(**sizes, **heads, final_logit_softcapping=0.5, pad_token_id=0)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="changes its logits after the output head"):
        load_causal_lm(str(tmp_path), "float32", CPU)


def test_sampling_settings_that_contradict_themselves_do_not_stop_a_save(model_dir, tmp_path):
    directory = model_dir()
    rewrite(directory, "generation_config.json", do_sample=False, temperature=0.6, top_p=0.9)
    load_causal_lm(directory, "float32", CPU).save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again/generation_config.json").read_text())
    assert (saved["do_sample"], saved["temperature"]) == (True, 0.6)


def test_a_hub_name_is_looked_up_only_when_asked(monkeypatch, tiny_model_dir):
    asked = []

    def fetch(name, allow_patterns):
        asked.append(name)
        assert not any(fnmatch("pytorch_model.bin", pattern) for pattern in allow_patterns)
        assert not any(fnmatch("modeling.py", pattern) for pattern in allow_patterns)
        return tiny_model_dir

    monkeypatch.setattr(locate, "snapshot_download", fetch)
    with pytest.raises(UserError, match=r"No model at 'someone/model'.*model\.hub: true"):
        load_causal_lm("someone/model", "float32", CPU)
    assert asked == []
    model = load_causal_lm("someone/model", "float32", CPU, hub=True)
    assert load_vocabulary("someone/model", model, hub=True).eos_ids == {256}
    assert set(asked) == {"someone/model"}


def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch):
    def fetch(name, allow_patterns):
        raise ConnectionError("no route to host\nmore lines")

    monkeypatch.setattr(locate, "snapshot_download", fetch)
    with pytest.raises(UserError, match=r"could not be fetched from the hub: no route to host$"):
        load_causal_lm("someone/model", "float32", CPU, hub=True)


def test_nan_weights_are_refused(model_dir):
    def spoil(model):
        model.model.norm.weight.data[3] = torch.nan

    with pytest.raises(UserError, match="NaN"):
        load_causal_lm(model_dir(spoil), "float32", CPU)


def test_weights_stored_as_integers_are_refused_by_name_and_buffers_are_not(model_dir):
    directory = model_dir()
    file, name = Path(directory, "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, "model.some_mask": torch.ones(3, dtype=torch.uint8)}, file, FORMAT)
    load_causal_lm(directory, "float32", CPU)
    save_file({**tensors, name: (100 * tensors[name]).to(torch.int8)}, file, FORMAT)
    with pytest.raises(UserError, match=rf"stores {name} as I8 in model\.safetensors"):
        load_causal_lm(directory, "float32", CPU)
    with pytest.raises(UserError, match=rf"stores {name} as I8"):
        load_trunk(directory, "float32", CPU)
