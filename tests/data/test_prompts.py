import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import table
from hypothesis import given
from hypothesis import strategies as st

from tether.config import DataSection
from tether.data.files import read_rows
from tether.data.messages import render_prompt
from tether.data.prompts import PromptSet, load_prompts
from tether.errors import UserError
from tether.types import Prompts

GOOD = b'{"prompt": "1+1=?", "answer": "2"}\n'


@pytest.fixture
def load(tmp_path, byte_tokenizer):
    """A function that writes bytes to a file and loads them as prompts."""

    def loaded(content: bytes, **fields) -> PromptSet:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content)
        return load_prompts(str(path), DataSection(train=str(path), **fields), byte_tokenizer)

    return loaded


def test_prompts_are_read_with_their_ids_and_other_columns(load, byte_tokenizer):
    prompts = load(GOOD + '{"prompt": "你好", "answer": "好", "level": 3}\n'.encode()).prompts
    assert prompts.texts == ["1+1=?", "你好"]
    assert prompts.columns == [{"answer": "2"}, {"answer": "好", "level": 3}]
    assert prompts.positions == [0, 1]
    assert byte_tokenizer.decode(prompts.ids[1]) == "<|user|>你好<|assistant|>"


@table(
    ("second_line", "reason"),
    [
        (b"{prompt: 1+1}", "not JSON"),
        (b"", "empty; write one JSON object per line"),
        (b"[1, 2]", "list"),
        (b'{"question": "1+1"}', "no column 'prompt'.*question"),
        (b'{"prompt": 7}', "int"),
        (b'{"prompt": null}', "NoneType"),
        (b'{"prompt": "  "}', "empty"),
        (b'{"prompt": "' + b"x" * 40 + b'"}', "42 tokens"),
        (b'{"prompt": "x", "a": ' + b"[" * 50 + b"]" * 50 + b"}", "nested too deeply"),
        (b'{"prompt": "x", "a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "nested too deeply"),
        (b'{"prompt": "\\ud800"}', "prompt"),  # half a character cannot be encoded
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(load, second_line, reason):
    with pytest.raises(UserError, match=rf"(?s)rows\.jsonl, line 2.*{reason}"):
        load(GOOD + second_line + b"\n" + GOOD, max_prompt_tokens=30)


def test_a_row_of_49_lists_in_each_other_is_taken(load):
    """The object itself is the fiftieth level."""
    assert len(load(b'{"prompt": "x", "a": ' + b"[" * 49 + b"]" * 49 + b"}\n")) == 1


def test_columns_are_quoted_on_one_line_of_readable_length(load):
    line = json.dumps({"a\nb": 1, "c" * 10**6: 2}).encode()
    with pytest.raises(UserError) as refusal:
        load(line)
    assert "it has a b, ccc" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_a_prompt_of_just_the_most_tokens_is_taken(load):
    assert len(load(GOOD, max_prompt_tokens=7)) == 1
    with pytest.raises(UserError, match="max_prompt_tokens = 6"):
        load(GOOD, max_prompt_tokens=6)


@table(("content", "reason"), [(b"", "no rows"), (b'{"prompt": "\xff"}\n', "UTF-8")])
def test_a_file_without_rows_or_in_another_encoding_is_refused_by_name(load, content, reason):
    with pytest.raises(UserError, match=rf"rows\.jsonl.*{reason}"):
        load(content)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.jsonl cannot be opened"):
        read_rows(str(tmp_path / "nowhere.jsonl"))


def test_a_folder_in_place_of_a_file_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="cannot be opened"):
        read_rows(str(tmp_path))


@table("odd", ["\u2028", "\u2029", "\x85"])
def test_only_newlines_end_a_row(load, odd):
    """JSON allows these inside a string, and str.splitlines() would cut the row in two."""
    line = json.dumps({"prompt": f"a{odd}b"}, ensure_ascii=False)
    assert load(f"{line}\n".encode()).prompts.texts == [f"a{odd}b"]


def test_windows_line_ends_and_a_missing_last_one_are_taken(load):
    assert len(load(GOOD.replace(b"\n", b"\r\n") + GOOD.strip())) == 2


def test_another_column_may_hold_the_prompt(load):
    prompts = load(b'{"question": "q", "prompt": 5}\n', prompt_column="question").prompts
    assert prompts.texts == ["q"]
    assert prompts.columns == [{"prompt": 5}]


def test_the_template_adds_a_system_turn_when_asked(byte_tokenizer):
    ids = render_prompt(byte_tokenizer, "hi", "be brief")
    assert byte_tokenizer.decode(ids) == "<|system|>be brief<|user|>hi<|assistant|>"


def test_messages_are_rendered_as_they_are_and_keep_their_own_system_turn(byte_tokenizer):
    turns = [("user", "1+1=?"), ("assistant", "2"), ("user", "sure?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    text = "<|user|>1+1=?<|assistant|>2<|end|><|user|>sure?<|assistant|>"
    assert byte_tokenizer.decode(render_prompt(byte_tokenizer, messages)) == text
    ids = render_prompt(byte_tokenizer, messages, "be brief")
    assert byte_tokenizer.decode(ids) == "<|system|>be brief" + text
    own = [{"role": "system", "content": "Add."}, messages[0]]
    assert byte_tokenizer.decode(render_prompt(byte_tokenizer, own, "be brief")) == (
        "<|system|>Add.<|user|>1+1=?<|assistant|>"
    )


def test_messages_without_a_template_are_refused_by_row(load, byte_tokenizer, monkeypatch):
    monkeypatch.setattr(byte_tokenizer, "chat_template", None)
    row = b'{"prompt": [{"role": "user", "content": "hi"}]}\n'
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: .*messages.*no chat template"):
        load(GOOD + row)


DROPS_LAST = "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}go:"


@pytest.mark.parametrize("prompt", ['"hi"', '[{"role": "user", "content": "hi"}]'])
def test_a_template_that_drops_the_last_turn_is_noticed(load, byte_tokenizer, monkeypatch, prompt):
    monkeypatch.setattr(byte_tokenizer, "chat_template", DROPS_LAST)
    with pytest.raises(UserError, match=r"line 1: .*template drops the last turn \('hi'\).*repair"):
        load(f'{{"prompt": {prompt}}}\n'.encode())


def test_a_template_may_trim_white_space(byte_tokenizer, monkeypatch):
    trims = "{% for m in messages %}{{ m.content | trim }}{% endfor %}:"
    monkeypatch.setattr(byte_tokenizer, "chat_template", trims)
    assert byte_tokenizer.decode(render_prompt(byte_tokenizer, " a  b\n")) == "a  b:"


def test_without_a_template_the_prompt_stands_as_it_is(byte_tokenizer, monkeypatch):
    monkeypatch.setattr(byte_tokenizer, "chat_template", None)
    assert byte_tokenizer.decode(render_prompt(byte_tokenizer, "hi")) == "hi"
    with pytest.raises(UserError, match="chat template"):
        render_prompt(byte_tokenizer, "hi", "be brief")


@pytest.mark.parametrize(
    "template",
    ["{{ 1 // 0 }}", "{% for %}", "{{ ''.__class__.__mro__[1] }}", "{{ messages.x.y.z }}"],
)
def test_a_template_that_fails_is_one_sentence_whatever_it_raises(
    byte_tokenizer, monkeypatch, template
):
    monkeypatch.setattr(byte_tokenizer, "chat_template", template)
    with pytest.raises(UserError, match=r"chat template does not render: [^\n]+$"):
        render_prompt(byte_tokenizer, "hi")


def test_columns_that_the_reward_wants_are_required_of_every_row(tmp_path, byte_tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b'{"prompt": "p", "solution": "3"}\n')
    section = DataSection(train=str(path))
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: the reward asks for 'answer'"):
        load_prompts(str(path), section, byte_tokenizer, ["answer"])


def test_left_out_rows_are_named_and_the_others_keep_their_lines(load):
    """Line 2 is broken, so the second prompt stands on line 3."""
    found = load(GOOD + b"[]\n" + GOOD, on_bad_row="skip")
    assert found.first(9).positions == [0, 2]
    assert sorted(found.for_iteration(0, 2, 0, True).positions) == [0, 2]
    [problem] = found.broken
    assert "rows.jsonl, line 2: it holds list" in problem


def test_a_csv_without_a_header_is_told_to_write_one(tmp_path, byte_tokenizer):
    path = tmp_path / "rows.csv"
    path.write_text("1+1=?,2\n2+2=?,4\n")
    for choice in ("refuse", "skip"):
        section = DataSection(train=str(path), on_bad_row=choice)
        with pytest.raises(UserError, match=r"rows\.csv, line 2: .*first line names 1\+1=\?, 2.*"):
            load_prompts(str(path), section, byte_tokenizer)


@pytest.mark.parametrize("name", ["e.jsonl", "e.csv", "e.parquet", "h.csv"])
def test_a_file_without_rows_is_refused_by_name(tmp_path, byte_tokenizer, name):
    path = tmp_path / name
    path.write_bytes(b"prompt,answer\n" if name == "h.csv" else b"")
    if name == "e.parquet":
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(UserError, match=rf"{name} has no rows"):
        load_prompts(str(path), DataSection(train=str(path)), byte_tokenizer)


def test_files_are_mixed_and_every_prompt_knows_its_file_and_line(tmp_path, byte_tokenizer):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.csv"
    a.write_bytes(GOOD * 3)
    b.write_text("prompt,answer\nx,1\n")
    files = [{"path": str(a), "weight": 3}, {"path": str(b)}]
    section = DataSection(train=files)
    found = load_prompts(section.files("train"), section, byte_tokenizer)
    taken = found.for_iteration(0, 4, 0, False)
    assert taken.files == [str(a)] * 3 + [str(b)]
    assert taken.positions == [0, 1, 2, 1]  # a CSV's first row stands on its second line


def numbered(size: int) -> PromptSet:
    texts = [str(i) for i in range(size)]
    nothing, rows = [None] * size, list(range(size))
    prompts = Prompts(texts, [[i] for i in rows], [{}] * size, rows, ["f"] * size, nothing)
    return PromptSet(prompts, [size], [1.0])


@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_every_prompt_comes_once_a_data_pass_across_iterations(size, count, seed, shuffle):
    """Windows wrap in mid-iteration; read out of order, as after a restart, they are the same."""
    data = numbered(size)
    iterations = -(-3 * size // count)
    windows = {i: data.for_iteration(i, count, seed, shuffle) for i in reversed(range(iterations))}
    stream = [p for i in range(iterations) for p in windows[i].positions]
    for data_pass in range(3):
        assert sorted(stream[data_pass * size : (data_pass + 1) * size]) == list(range(size))


def test_each_data_pass_has_a_fresh_order():
    orders = [tuple(numbered(20).for_iteration(i, 20, 0, True).positions) for i in range(4)]
    assert len(set(orders)) == 4
    assert tuple(numbered(20).for_iteration(0, 20, 1, True).positions) not in orders


def test_without_shuffling_the_file_order_wraps():
    assert numbered(5).for_iteration(1, 3, 0, False).positions == [3, 4, 0]


def test_a_window_keeps_text_ids_columns_and_line_together():
    taken = numbered(9).for_iteration(2, 7, 0, True)
    assert taken.texts == [str(p) for p in taken.positions]
    assert taken.ids == [[p] for p in taken.positions]


def test_samples_of_one_prompt_stand_side_by_side():
    assert numbered(2).first(5).repeat(3).positions == [0, 0, 0, 1, 1, 1]
