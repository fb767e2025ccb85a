"""The small random Llama that most tests use; a module of its own, as fault trials import it
in processes that need nothing else of the tests."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(
    vocabulary: int,
    eos_id: int,
    seed: int = 0,
    initializer_range: float = 0.3,
    layers: int = 2,
    tied: bool = True,
) -> LlamaForCausalLM:
    """Random weights large enough that log-probs differ clearly from token to token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=initializer_range,
        tie_word_embeddings=tied,
        eos_token_id=eos_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()
