"""A GGUF file, written here by the rules of its format, gives back the model it was made from."""

import os

import gguf
import pytest
import torch
import transformers
from helpers import changed, distinct_letters, slow_log_probs, tiny_llama

import tether
from models.families import make_family
from tether.errors import UserError
from tether.models import gguf as gguf_files
from tether.models.loading import load_causal_lm, load_trunk
from tether.models.vocabulary import load_vocabulary

CPU = torch.device("cpu")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def interleaved(weight, heads):
    """GGUF pairs the two halves of each head's rotation next to each other."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, tokenizer, packed=None):
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    spelt = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    spelt += [
        "ab",
        "<|endoftext|>",
        *(f"<|unused{i}|>" for i in range(len(spelt) + 2, config.vocab_size)),
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(spelt)
    writer.add_token_merges(["a b"])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if text.startswith("<|") else normal for text in spelt])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        weight = weight.numpy()
        if "q_proj" in name:
            weight = interleaved(weight, config.num_attention_heads)
        if "k_proj" in name:
            weight = interleaved(weight, config.num_key_value_heads)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if packed is not None and weight.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(weight, packed), raw_dtype=packed)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.fixture
def gguf_file(tmp_path, byte_tokenizer):
    return write_gguf(tmp_path / "small.gguf", make_family("smollm2"), byte_tokenizer)


def test_log_probs_are_those_of_the_model_that_was_written(gguf_file):
    found, written = load_causal_lm(gguf_file, "float32", CPU), make_family("smollm2")
    for prompt, ids in [([5, 9, 200], [7, 8, 256]), ([1], [2, 3, 4, 5])]:
        expected = slow_log_probs(written, prompt, ids)
        torch.testing.assert_close(slow_log_probs(found, prompt, ids), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_packed_weights_are_unpacked_and_can_be_saved_again(tmp_path, byte_tokenizer):
    """As on disk, 8 bits and a scale for 32 numbers: near the written weights, and then plain."""
    model, packed = tiny_llama(300, 256), gguf.GGMLQuantizationType.Q8_0
    found = load_causal_lm(
        write_gguf(tmp_path / "packed.gguf", model, byte_tokenizer, packed), "float32", CPU
    )
    for name, weight in model.state_dict().items():
        if weight.ndim == 2:
            blocks = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), packed), packed)
            weight = torch.from_numpy(blocks)
        torch.testing.assert_close(found.state_dict()[name], weight, rtol=0, atol=1e-6)
    found.save_pretrained(tmp_path / "plain")
    again = load_causal_lm(str(tmp_path / "plain"), "float32", CPU)
    assert again.dtype == torch.float32
    for name, weight in found.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_its_tokenizer_comes_along(gguf_file, byte_tokenizer):
    vocabulary = load_vocabulary(gguf_file, load_causal_lm(gguf_file, "float32", CPU))
    assert 256 in vocabulary.eos_ids
    ids = byte_tokenizer("2+2=?", add_special_tokens=False).input_ids
    assert vocabulary.tokenizer("2+2=?", add_special_tokens=False).input_ids == ids
    assert vocabulary.decode([*ids, 256]) == "2+2=?"
    assert vocabulary.tokenizer.chat_template == byte_tokenizer.chat_template


@pytest.mark.long
def test_it_trains_with_an_adapter(gguf_file, tiny_config):
    config = changed(
        tiny_config,
        model={"actor": gguf_file, "lora": {"rank": 2}},
        train__iterations=1,
        data__heldout=None,
    )
    result = tether.train(config, reward=distinct_letters)
    assert tether.generate("2+2=?", model=str(result.run))


def test_without_the_package_one_sentence_names_it(gguf_file, monkeypatch):
    monkeypatch.setattr(gguf_files, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gguf"):
        load_causal_lm(gguf_file, "float32", CPU)


def test_a_file_that_is_no_gguf_is_one_sentence(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(UserError, match="does not load as a causal language model") as stop:
        load_causal_lm(str(tmp_path / "broken.gguf"), "float32", CPU)
    assert "\n" not in str(stop.value)


def test_a_file_cut_short_is_one_sentence(gguf_file, tmp_path):
    with open(gguf_file, "rb") as file:
        content = file.read()
    cut = tmp_path / "cut.gguf"
    for share in (0.0001, 0.01, 0.05, 0.5, 0.999):
        cut.write_bytes(content[: int(len(content) * share)])
        for load in (load_causal_lm, load_trunk):
            with pytest.raises(UserError, match=r"cut\.gguf [^\n]+$"):
                load(str(cut), "float32", CPU)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and every file's memory of it forgotten."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf_files._unpacked.cache_clear()
    return tmp_path / "cache" / "tether" / "gguf"


def count_unpackings(monkeypatch) -> list:
    """Each reading of a GGUF file by transformers, whoever asks for it."""
    found, load = [], transformers.AutoModelForCausalLM.from_pretrained

    def counted(*arguments, **options):
        if "gguf_file" in options:
            found.append(options["gguf_file"])
        return load(*arguments, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", counted)
    return found


def test_a_file_is_unpacked_once_and_gives_the_same_bits_again(gguf_file, cache, monkeypatch):
    unpackings = count_unpackings(monkeypatch)
    models = []
    for _ in range(2):
        models.append(load_causal_lm(gguf_file, "float32", CPU).state_dict())
        load_vocabulary(gguf_file, load_causal_lm(gguf_file, "float32", CPU))
        gguf_files._unpacked.cache_clear()  # as another command would begin
    assert len(unpackings) == 1
    written = make_family("smollm2").state_dict()
    for name, weight in models[1].items():
        assert torch.equal(weight, models[0][name])
        torch.testing.assert_close(weight, written[name], rtol=0, atol=1e-6)


def test_what_is_kept_and_damaged_is_unpacked_again(gguf_file, cache, monkeypatch):
    loaded = load_causal_lm(gguf_file, "float32", CPU).state_dict()
    before = {name: weight.clone() for name, weight in loaded.items()}  # it is the file, mapped
    [place] = cache.iterdir()
    weights = place / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    gguf_files._unpacked.cache_clear()
    unpackings = count_unpackings(monkeypatch)
    after = load_causal_lm(gguf_file, "float32", CPU).state_dict()
    assert len(unpackings) == 1
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert [path.name for path in cache.iterdir()] == [place.name]


def test_another_file_at_the_same_path_is_another_model(gguf_file, cache, byte_tokenizer):
    before = load_causal_lm(gguf_file, "float32", CPU).state_dict()["model.norm.weight"]
    other = make_family("smollm2")
    with torch.no_grad():
        other.model.norm.weight += 1
    os.unlink(gguf_file)
    write_gguf(gguf_file, other, byte_tokenizer)
    after = load_causal_lm(gguf_file, "float32", CPU).state_dict()["model.norm.weight"]
    torch.testing.assert_close(after, before + 1)


def test_a_cache_that_cannot_be_written_is_done_without(gguf_file, cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("no folder")
    assert load_causal_lm(gguf_file, "float32", CPU).dtype == torch.float32
