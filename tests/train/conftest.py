import pytest
import torch
from helpers import changed, configured, distinct_letters
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tether.models.loading import Vocabulary
from tether.ppo.roles import build_roles


@pytest.fixture
def float64_norms(monkeypatch):
    """transformers' norms round to float32 inside, too coarse for some comparisons."""

    def forward(norm, x):
        return norm.weight * x * torch.rsqrt((x**2).mean(-1, keepdim=True) + norm.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@pytest.fixture
def scored_config(tiny_config) -> dict:
    """Longer responses, so that lengths differ; a test passes `distinct_letters` as the reward."""
    return changed(tiny_config, rollout__max_response_tokens=12, actor__entropy_coef=0.01)


@pytest.fixture
def build(scored_config):
    """A function that makes (roles, config), changed as a test wants."""

    def built(reward=distinct_letters, **dotted):
        config = configured(scored_config, **dotted)
        return build_roles(config, reward), config

    return built


@pytest.fixture
def vocabulary(byte_tokenizer) -> Vocabulary:
    return Vocabulary(byte_tokenizer, frozenset([byte_tokenizer.eos_token_id]))
