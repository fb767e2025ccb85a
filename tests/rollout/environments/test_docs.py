"""The environments of the docs, as they stand there."""

import re
from pathlib import Path

from rollout.talk import say, settings, vocabulary
from tether.config import DataSection
from tether.data.chat_templates import offer_tools
from tether.rollout.tools.build import build_episode_source
from tether.rollout.turns import close_all
from tether.types import Prompts

DOCS = Path(__file__).resolve().parents[3] / "docs"


def python_of(page: str, folder: Path) -> Path:
    """Write the first Python block of a page under the name in its first line."""
    block = re.search(r"```python\n(# (\w+\.py)\n.*?)```", (DOCS / page).read_text(), re.DOTALL)
    path = folder / block.group(2)
    path.write_text(block.group(1))
    return path


def test_the_environment_does_what_the_page_says(tmp_path, byte_tokenizer):
    kind = f"{python_of('environments.md', tmp_path)}:Guess"
    section = settings(tools=[], environment=kind, max_turns=5)
    source = build_episode_source(
        section, vocabulary(byte_tokenizer), DataSection(train="environment")
    )
    prompts = Prompts([""], [[]], [{"seed": 7}], [0], [""], [None])
    [row] = source.episodes(prompts)
    said = "I think of a number from 10 to 99. You have 5 guesses."
    assert byte_tokenizer.decode(row.prompt_ids) == f"<|user|>{said}<|assistant|>"
    assert say(row, "5<|end|>") == "<|user|>more<|assistant|>"
    assert say(row, "90<|end|>") == "<|user|>less<|assistant|>"
    assert say(row, "17<|end|>") is None
    assert row.turn_rewards == (-0.1, -0.1, 1.0)


def test_the_class_of_the_page_on_trl_runs_as_it_stands(tmp_path, byte_tokenizer):
    arguments = {"class": f"{python_of('trl-environments.md', tmp_path)}:Counter"}
    section = settings(tools=[], environment={"kind": "trl", "arguments": arguments}, max_turns=6)
    source = build_episode_source(section, vocabulary(byte_tokenizer))
    try:
        prompts = Prompts(["Count."], [[1]], [{"target": 3}], [0], [""], [None])
        [row] = source.episodes(prompts)
        call = '<tool_call>{"name": "increment", "arguments": {"step": 3}}</tool_call><|end|>'
        assert "3" in say(row, call)
        assert say(row, "Three.<|end|>") is None
        close_all([row])
        assert row.turn_rewards == (None, 1.0)
    finally:
        offer_tools(byte_tokenizer, None)
