"""The tools of docs/search.md, as they stand there."""

import re
from pathlib import Path

import pytest

from rollout.talk import say, settings, vocabulary
from tether.rollout.tools.build import build_episode_source
from tether.types import Prompts

PAGE = Path(__file__).resolve().parents[3] / "docs" / "search.md"


@pytest.fixture
def files(tmp_path) -> Path:
    """Every Python block of the page, under the name in its first line."""
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", block).group(1)
        (tmp_path / name).write_text(block, encoding="utf-8")
    return tmp_path


def row_with(byte_tokenizer, columns: dict, **fields):
    prompts = Prompts(["p"], [[1]], [columns], [0], [""], [None])
    [row] = build_episode_source(settings(**fields), vocabulary(byte_tokenizer)).episodes(prompts)
    return row


def test_the_tools_do_what_the_page_says(files, byte_tokenizer):
    tools = [f"{files}/my_tools.py:weather", f"{files}/more_tools.py:translate", "calculator"]
    row = row_with(byte_tokenizer, {}, tools=tools)
    assert say(row, "<weather>Aru</weather>") == "<result>rain</result>"
    assert say(row, "[[water]]") == "((水))"
    assert say(row, "<calculate>(1 + 2) * 3.5</calculate>") == "<result>10.5</result>"
