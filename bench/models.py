"""The models that every program of the benchmark loads: plain Hugging Face directories in
bench/.cache, made once.

toy      4 layers of 128, a vocabulary of 49,152; random weights from a fixed seed
smollm2  SmolLM2-135M-Instruct in float32, unpacked from the file that `make smollm2` fetches;
         without it, random weights of the same shape, and the tables say so
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tether.models.loading import load_causal_lm
from tether.models.vocabulary import load_vocabulary

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "bench" / ".cache"
GGUF = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ORIGIN = "origin.json"  # beside the weights: where they come from

VOCABULARY = 49_152
SEED = 0

TINY = LlamaConfig(  # for `make test`
    vocab_size=512,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
TOY = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
SMOLLM2 = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    tie_word_embeddings=True,
)


def model_directory(name: str, cache: Path = CACHE) -> Path:
    """Where the model of this name lies; made if it is not there yet."""
    directory = cache / "models" / name
    if not (directory / ORIGIN).is_file():  # written last
        directory.mkdir(parents=True, exist_ok=True)
        model, tokenizer, origin = _make(name)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        (directory / ORIGIN).write_text(json.dumps({"origin": origin}), encoding="utf-8")
    return directory


def origin(name: str, cache: Path = CACHE) -> str:
    """In a few words, where its weights come from."""
    text = (model_directory(name, cache) / ORIGIN).read_text(encoding="utf-8")
    return json.loads(text)["origin"]


def _make(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    if name == "smollm2" and GGUF.is_file():
        model = load_causal_lm(str(GGUF), "float32", torch.device("cpu"))
        tokenizer = load_vocabulary(str(GGUF), model).tokenizer
        return model, tokenizer, f"{GGUF.name}, unpacked to float32"
    config = {"tiny": TINY, "toy": TOY, "smollm2": SMOLLM2}[name]
    torch.manual_seed(SEED)
    return LlamaForCausalLM(config), _tokenizer(config.vocab_size), "random weights"


def _tokenizer(size: int) -> PreTrainedTokenizerFast:
    """One word an id: `w7` is 7. The peers ask for a tokenizer, although prompts are ids."""
    words = {f"w{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="w2", pad_token="w3"
    )
