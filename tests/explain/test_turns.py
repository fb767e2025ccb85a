"""The trace of a policy that searches: turns, calls, and tokens that it only read."""

import pytest
from faults.searching_world import make_searching_world

from explain.test_trace_text import texts as texts_of
from tether import api
from tether.explain.trace_text import tell


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("searching")
    corpus = folder / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "k\\nIt is 7."}\n')
    recipe = make_searching_world(folder).recipe("bm25", {"corpus": str(corpus)})
    turns = {"rollout.max_turns": 20, "rollout.max_response_tokens": 240}
    return api.trace("3?", str(recipe), columns={"ground_truth": "7"}, overrides=turns)


def test_the_record_tells_who_said_what_and_what_was_asked(record):
    turns = record["turns"]
    assert [turn["policy"] for turn in turns] == [i % 2 == 0 for i in range(len(turns))]
    assert len(turns) >= 3
    assert turns[0]["text"] == "<search>k</search>"
    assert turns[1]["text"] == "<information>k\nIt is 7.</information>"
    assert turns[-1]["text"] == "<answer>7</answer>"
    assert record["finish_reason"] == "stop"
    assert record["score"] == 1
    assert len(record["calls"]) == len(turns) // 2
    assert record["calls"][0]["arguments"] == "k"


def test_tokens_that_were_only_read_have_no_numbers(record):
    sections = tell(record, "en", explain=True)
    [table] = [b for s in sections if s.title.startswith("7") for b in s.blocks][:1]
    mask = record["tokens"]["response_mask"]
    assert not all(mask)
    for own, row in zip(mask, table.rows[1:], strict=True):
        assert all(cell == "–" for cell in row[2:]) is (not own)


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ["Turns and calls of tools", "tool (read only)", "search", "asked", "a tool's"]),
        ("zh", ["各轮对话与工具调用", "工具（只读）", "search", "参数", "来自工具"]),
    ],
)
def test_turns_and_calls_are_told_in_both_languages(record, language, words):
    told = "\n".join(texts_of(tell(record, language, explain=False)))
    for word in words:
        assert word in told, word


def test_a_call_that_failed_is_told_with_its_error(record):
    failed = {**record["calls"][0], "error": "it hung", "fault": "tool"}
    told = "\n".join(texts_of(tell({**record, "calls": [failed]}, "en", explain=False)))
    assert "error: it hung" in told


def test_the_reward_of_each_turn_and_the_words_of_a_judge_are_told(record):
    rewards = iter((0.5, -0.25, *[0] * 20))
    turns = [{**t, "reward": next(rewards)} if t["policy"] else t for t in record["turns"]]
    hostile = "Score: 1 \x1b[31m<script>alert(1)</script>"
    sections = tell({**record, "turns": turns, "score_extras": {"verdict": hostile}}, "en", False)
    [said] = [b for s in sections if s.title.startswith("Turns") for b in s.blocks][:1]
    assert said.rows[0][-1] == "score"
    assert [row[-1] for row in said.rows[1:4]] == ["0.5", "–", "-0.25"]
    assert hostile in "\n".join(texts_of(sections))
