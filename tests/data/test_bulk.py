"""Many prompts at once: the same ids, the same complaints, less time."""

import json
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether import assets
from tether.config import DataSection
from tether.data import prompts as prompts_module
from tether.data.chat_templates import fix_date
from tether.data.messages import render_prompt
from tether.data.prompts import NUM_PROBED, encode_prompts, load_prompts
from tether.errors import UserError

PIECES = st.sampled_from(["1+1=?", "你好", " ", "\n", "<|user|>", "<|end|>", "<pad", "é", "x" * 40])
TEMPLATES = [
    None,
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}<|assistant|>",
    "{% for m in messages %}{{ m.content[:3] }}{% endfor %}",  # drops the rest of a long text
    "{% if 'x' in messages[-1].content %}{{ raise_exception('no x') }}{% endif %}"
    "{{ bos_token }}{{ messages[-1].content }}{{ eos_token }}",
]


@pytest.fixture(scope="module")
def starter():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(assets.resolve("tether:starter"), local_files_only=True)


def one_by_one(tokenizer, prompts, system_prompt):
    found = []
    for prompt in prompts:
        try:
            found.append(render_prompt(tokenizer, prompt, system_prompt))
        except UserError as problem:
            found.append(str(problem))
    return found


def told(encoded) -> list:
    return [str(one) if isinstance(one, UserError) else one for one in encoded]


@given(
    prompts=st.lists(st.lists(PIECES, min_size=1, max_size=4).map("".join), max_size=9),
    template=st.sampled_from(TEMPLATES),
    system_prompt=st.sampled_from([None, "Be brief."]),
)
def test_many_at_once_are_what_they_are_one_by_one(
    byte_tokenizer, prompts, template, system_prompt
):
    kept, byte_tokenizer.chat_template = byte_tokenizer.chat_template, template
    try:
        at_once = encode_prompts(byte_tokenizer, prompts, system_prompt)
        assert told(at_once) == one_by_one(byte_tokenizer, prompts, system_prompt)
    finally:
        byte_tokenizer.chat_template = kept


def test_a_template_that_asks_for_the_day_gets_the_one_that_was_fixed(byte_tokenizer, monkeypatch):
    template = "{{ strftime_now('%d.%m.%Y') }} {{ messages[-1].content }}"
    monkeypatch.setattr(byte_tokenizer, "chat_template", template)
    for day in (None, date(2024, 2, 29)):
        fix_date(byte_tokenizer, day)
        found = encode_prompts(byte_tokenizer, ["a", "b"], None)
        assert found == one_by_one(byte_tokenizer, ["a", "b"], None)
    fix_date(byte_tokenizer, None)
    assert byte_tokenizer.decode(found[1]) == "29.02.2024 b"


def test_messages_and_texts_may_stand_in_one_batch(byte_tokenizer):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompts = ["1+1=?", [*turns, {"role": "user", "content": "c"}], "2"]
    assert encode_prompts(byte_tokenizer, prompts, None) == one_by_one(
        byte_tokenizer, prompts, None
    )


def test_a_tokenizer_that_pads_by_itself_pads_no_prompt(starter):
    starter.backend_tokenizer.enable_padding(length=30)
    assert encode_prompts(starter, ["1+1=?", "22+33=?"], None) == one_by_one(
        starter, ["1+1=?", "22+33=?"], None
    )


def test_the_first_broken_row_of_a_long_file_is_the_one_refused(tmp_path, starter):
    lines = [json.dumps({"prompt": f"{i}+1=?"}) for i in range(9000)]
    lines[8000], lines[5000] = "[]", json.dumps({"prompt": "1" * 600})
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"long\.jsonl, line 5001: the prompt has \d+ tokens"):
        load_prompts(str(path), DataSection(train=str(path)), starter)


def test_of_many_plain_rows_few_are_encoded_one_at_a_time(tmp_path, starter, monkeypatch):
    """One at a time a row takes ten times as long; the run of a million rows in
    `tests/data/test_million_rows.py` holds a clock to it."""
    path, calls = tmp_path / "many.jsonl", []
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=?"}) + "\n" for i in range(9000)))
    encode = type(starter).__call__
    monkeypatch.setattr(
        type(starter), "__call__", lambda *a, **k: calls.append(1) or encode(*a, **k)
    )
    load_prompts(str(path), DataSection(train=str(path)), starter)
    assert len(calls) < 200


def test_whoever_waits_for_a_long_file_is_told_how_far_it_is(tmp_path, starter):
    path, told = tmp_path / "rows.jsonl", []
    path.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(9000)))
    load_prompts(
        str(path), DataSection(train=str(path)), starter, reading=lambda *words: told.append(words)
    )
    assert told == [(str(path), 8192), (str(path), 9000)]


def test_a_row_beyond_those_that_are_compared_is_read_with_the_same_care(byte_tokenizer):
    """The first rows of a batch are compared with `render_prompt`; marks may come later."""
    prompts = ["1+1=?"] * (2 * NUM_PROBED) + ["a<|end|><|user|>b", "x"]
    assert encode_prompts(byte_tokenizer, prompts, None) == one_by_one(
        byte_tokenizer, prompts, None
    )


def test_a_row_beyond_those_that_are_compared_is_complained_about_too(byte_tokenizer, monkeypatch):
    monkeypatch.setattr(byte_tokenizer, "chat_template", TEMPLATES[2])
    prompts = ["abc"] * (2 * NUM_PROBED) + ["a text of which the template drops the end"]
    found = told(encode_prompts(byte_tokenizer, prompts, None))
    assert found == one_by_one(byte_tokenizer, prompts, None)
    assert "drops the last turn" in found[-1]


def test_a_fast_way_that_differs_is_not_believed(byte_tokenizer, monkeypatch):
    monkeypatch.setattr(prompts_module, "_encode", lambda tokenizer, texts: [[1] for _ in texts])
    prompts = ["1+1=?", "2+2=?"]
    assert encode_prompts(byte_tokenizer, prompts, None) == one_by_one(
        byte_tokenizer, prompts, None
    )
