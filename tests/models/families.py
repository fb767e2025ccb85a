"""Small random models of the families that tether is proven on."""

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 300  # more than the tokenizer's 260, as models with padded embeddings have
EOS_IDS = [256, 7, 70]
SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "eos_token_id": EOS_IDS,
    "bos_token_id": None,
    "pad_token_id": None,
}
# SmolLM2-135M in small: 3 query heads a key-value head, a tied head.
SMOL = {
    "hidden_size": 36,
    "intermediate_size": 96,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "rope_theta": 100_000.0,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.2,
    "eos_token_id": EOS_IDS,
    "bos_token_id": None,
}
# One full layer, then two that see four tokens back.
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}

FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHARED)),
    "smollm2": lambda: LlamaForCausalLM(LlamaConfig(**{**SHARED, **SMOL})),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHARED)),
    "qwen2-window": lambda: Qwen2ForCausalLM(Qwen2Config(**SHARED, **WINDOW)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHARED, head_dim=12)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHARED, sliding_window=4)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
}


def make_family(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return FAMILIES[name]().eval()
