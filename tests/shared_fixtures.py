"""Shapes are checked at run time (see shapes.py); tiny models are built once per session."""

import json
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Before the hook below: modules first imported while it loads tether miss their compiled files.
import httpx  # noqa: F401
import jaxtyping
import jinja2.sandbox  # noqa: F401
import peft  # noqa: F401
import pydantic  # noqa: F401
import pytest
import starlette.testclient  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.testing
import typer.testing  # noqa: F401
from hypothesis import settings
from jaxtyping import install_import_hook
from shapes import are_checked_in, modules_with_shapes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRMSNorm

with install_import_hook(modules_with_shapes(), "beartype.beartype"):
    import tether.api
    import tether.types

from helpers import changed, configured, distinct_letters, tiny_llama, tiny_recipe

from tether import assets
from tether.models.vocabulary import Vocabulary
from tether.ppo.roles import build_roles

settings.register_profile("tether", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("tether")

SPECIAL = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    jaxtyping.config.update("jaxtyping_disable", not are_checked_in(item.path))


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """What tests unpack is not left in the cache of whoever runs them."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and the four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet + SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>"
    )
    # The starter's: one that does not ship is rendered in a process of its own, started per run.
    starter = assets.resolve("tether:starter") / "tokenizer_config.json"
    fast.chat_template = json.loads(starter.read_bytes())["chat_template"]
    return fast


@pytest.fixture(scope="session")
def tiny_model() -> PreTrainedModel:
    """The weights of `tiny_model_dir`, shared by the tests: do not change them."""
    return tiny_llama(260, 256)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory, byte_tokenizer) -> str:
    """A random two-layer Llama with a byte tokenizer, as a Hugging Face directory."""
    directory = tmp_path_factory.mktemp("tiny-model")
    tiny_llama(len(byte_tokenizer), byte_tokenizer.eos_token_id).save_pretrained(directory)
    byte_tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(6) for b in (1, 22, 333)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def tiny_config(tiny_model_dir, tiny_data, tmp_path) -> dict:
    return tiny_recipe(tiny_model_dir, tiny_data, tmp_path / "run")


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


__all__ = ["tether"]
