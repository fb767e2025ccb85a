"""examples/own_tool: its rows teach the call and not what the tool says; its recipe is valid."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from tether.config.load import load_config
from tether.config.stages import ConversationSection
from tether.data.dialogues import load_conversations
from tether.models.vocabulary import decode, load_tokenizer

SOURCE = Path(__file__).resolve().parent.parent / "examples" / "own_tool"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the example, with its rows."""
    copy = shutil.copytree(SOURCE, tmp_path / "own_tool")
    run_file(copy / "make_rows.py").main()
    monkeypatch.chdir(copy)
    return copy


def run_file(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_episode_teaches_the_call_and_not_the_answer_of_the_tool(folder):
    rows = [json.loads(line) for line in Path("episodes.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer("tether:search_starter")
    data = ConversationSection(train="episodes.jsonl")
    found = load_conversations("episodes.jsonl", data, tokenizer, None)
    registry = run_file(folder / "registry.py").registry
    asked = [(row, c) for row, c in zip(rows, found, strict=True) if len(row["response"]) == 3]
    assert 0.3 < len(asked) / len(rows) < 0.5
    for row, conversation in asked:
        call, result, answer = row["response"]
        name = call.removeprefix("<registry>").removesuffix("</registry>")
        assert result == f"<result>{registry(name)}</result>"
        pairs = list(zip(conversation.response_ids, conversation.loss_mask, strict=True))
        learnt = [token for token, is_learnt in pairs[:-1] if is_learnt]
        assert decode(tokenizer, learnt) == call + answer
        assert decode(tokenizer, [token for token, is_learnt in pairs if not is_learnt]) == result


def test_held_out_names_are_in_no_episode_and_the_recipe_is_valid(folder):
    prompts = [
        json.loads(line)["prompt"] for line in Path("heldout.jsonl").read_text().splitlines()
    ]
    assert len(set(prompts)) == 60
    shown = Path("episodes.jsonl").read_text() + Path("train.jsonl").read_text()
    assert not any(prompt.split()[2] + " " + prompt.split()[3] in shown for prompt in prompts)
    assert load_config("recipe.yaml").rollout.max_turns == 2
    assert run_file(folder / "registry.py").registry(" No One ") == "nobody has that name"
