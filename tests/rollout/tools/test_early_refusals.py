"""Tools, environments and prompts that could only fail are refused before training."""

import time

import pytest
from helpers import changed
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rollout.talk import settings, vocabulary
from tether import api
from tether.config import DataSection
from tether.config.load import validate_config
from tether.data.prompts import load_prompts
from tether.errors import UserError
from tether.rollout.tools.build import build_episode_source
from tether.types import Prompts

TOOLS = """
import time
def two(a, b): return a
def none(): return "x"
def keyword(*, text): return text
async def later(text): return text
def fine(text, unit="km"): return text + unit

class NeedsName:
    def __init__(self, name): self.name = name
    def reset(self, columns): return None
    def step(self, text): return None

class NoStep:
    def reset(self, columns): return None

class Hangs:
    def __init__(self): time.sleep(20)
    def reset(self, columns): return None
    def step(self, text): return None
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(TOOLS)
    return path


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("two", r"needs 2 arguments \(a, b\), but a tool is called with one text"),
        ("none", "takes no argument"),
        ("keyword", "argument"),
        ("later", "async def"),
    ],
)
def test_a_tool_that_cannot_be_called_with_one_text_is_refused(tiny_config, own, name, why):
    fields = {"rollout__tools": [f"{own}:{name}"], "rollout__max_observation_tokens": 40}
    config = changed(tiny_config, **fields, rollout__max_response_tokens=60)
    with pytest.raises(UserError, match=why):
        api.check(validate_config(config))


def test_a_tool_with_defaults_is_fine(own, byte_tokenizer):
    source = build_episode_source(settings(tools=[f"{own}:fine"]), vocabulary(byte_tokenizer))
    assert len(source.episodes(Prompts(["p"], [[1]], [{}], [0], [""], [None]))) == 1


def test_a_tool_may_be_named_by_its_module(tmp_path, own, monkeypatch, byte_tokenizer):
    (tmp_path / "my_tools_package").mkdir()
    (tmp_path / "my_tools_package" / "__init__.py").write_text("from beside_tools import fine\n")
    (tmp_path / "beside_tools.py").write_text("def fine(text): return text\n")
    monkeypatch.chdir(tmp_path)
    named = settings(tools=["my_tools_package:fine"])
    source = build_episode_source(named, vocabulary(byte_tokenizer))
    assert len(source.episodes(Prompts(["p"], [[1]], [{}], [0], [""], [None]))) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [("NeedsName", "needs an argument 'name'"), ("NoStep", "has no method 'step'")],
)
def test_an_environment_that_cannot_work_is_refused(own, byte_tokenizer, name, why):
    section = settings(tools=[], environment=f"{own}:{name}")
    with pytest.raises(UserError, match=why):
        build_episode_source(section, vocabulary(byte_tokenizer))


def test_an_environment_whose_constructor_hangs_has_the_limit(own, byte_tokenizer):
    hangs = {"kind": f"{own}:Hangs", "timeout_seconds": 0.3}
    section = settings(tools=[], environment=hangs, max_observation_tokens=40)
    episodes = build_episode_source(section, vocabulary(byte_tokenizer)).episodes
    began = time.monotonic()
    [row] = episodes(Prompts(["p"], [[1]], [{}], [0], [""], [None]))
    assert time.monotonic() - began < 5
    assert "longer than timeout_seconds" in row.calls[0].error


def test_tools_need_no_other_field_to_be_set(tiny_config):
    """The defaults fit each other."""
    rollout = {k: v for k, v in tiny_config["rollout"].items() if k != "max_response_tokens"}
    config = validate_config({**tiny_config, "rollout": {**rollout, "tools": ["calculator"]}})
    assert config.rollout.max_response_tokens == 384
    assert config.rollout.max_observation_tokens == 128


def test_a_prompt_without_tokens_is_refused_by_row(tmp_path):
    """A vocabulary that drops what it does not have."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<|end|>": 1}, merges=[]))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "好"}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: the prompt has no tokens"):
        load_prompts(str(path), DataSection(train=str(path)), fast)
