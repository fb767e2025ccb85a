"""Tools called by JSON in the chat template's own form."""

import json

import pytest
import torch
from helpers import table, tiny_llama

from rollout.talk import say, settings
from tether.data.chat_templates import offer_tools
from tether.data.messages import render_prompt
from tether.errors import UserError
from tether.models.vocabulary import Vocabulary
from tether.rollout.call_forms import CallForm, find_form
from tether.rollout.local import LocalSampler
from tether.rollout.sampler import Greedy
from tether.rollout.tools.build import build_episode_source
from tether.types import Prompts

# The shapes in use, cut to what matters: how tools, calls and results are written.
QWEN = (
    "{% if tools %}<|system|>Tools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|user|>{% endif %}"
    "{{ '\n<tool_response>\n' + m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>\n{% endif %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if m.tool_calls %}<|assistant|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|end|>"
    "{% elif m.role == 'tool' %}<|ipython|>\n\n{{ m.content | tojson }}<|end|>"
    "{% else %}<|{{ m.role }}|>\n\n{{ m.content | trim }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}"
)
CHATML = (  # SmolLM2: the template knows nothing of tools
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
XML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}<function={{ m.tool_calls[0].function.name }}>{% endif %}<|end|>{% endfor %}"  # noqa: E501

TOOLS = '''
import time

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

async def shout(text: str) -> str:
    """Say it louder.

    Args:
        text: What to say.
    """
    return text.upper()

def fail(text: str) -> str:
    """Fail.

    Args:
        text: Anything.
    """
    if text == "hang":
        time.sleep(1)
    if text == "bytes":
        return b"x"
    raise RuntimeError("no luck")

def bare(a, b):
    return a
'''


@pytest.fixture
def model(byte_tokenizer, monkeypatch):
    def with_template(template):
        monkeypatch.setattr(byte_tokenizer, "chat_template", template)
        return Vocabulary(byte_tokenizer, frozenset([byte_tokenizer.eos_token_id]))

    yield with_template
    offer_tools(byte_tokenizer, None)


@pytest.fixture
def begin(tmp_path, model):
    path = tmp_path / "my.py"
    path.write_text(TOOLS)

    def begun(template=QWEN, names=("add", "shout", "fail"), timeout=5.0, **fields):
        tools = [{"kind": f"{path}:{name}", "timeout_seconds": timeout} for name in names]
        section = settings(tools=tools, tool_calls="json", **fields)
        prompts = Prompts(["p"], [[1]], [{}], [0], [""], [None])
        [row] = build_episode_source(section, model(template)).episodes(prompts)
        return row

    return begun


def call(name, arguments, key="arguments"):
    return json.dumps({"name": name, key: arguments})


@table(
    "template, turn, observation",
    [
        (
            QWEN,
            f"Let me see.\n<tool_call>\n{call('add', {'a': 2, 'b': 3})}\n</tool_call><|end|>",
            "\n<|user|>\n<tool_response>\n5\n</tool_response><|end|>\n<|assistant|>\n",
        ),
        (
            QWEN,
            f"<tool_call>{call('add', {'a': 2})}</tool_call>"
            f"<tool_call>{call('shout', {'text': 'a'})}</tool_call><|end|>",
            "\n<|user|>\n<tool_response>\n3\n</tool_response>\n<tool_response>\nA\n"
            "</tool_response><|end|>\n<|assistant|>\n",
        ),
        (
            LLAMA,
            call("shout", {"text": 'say "x"'}, "parameters") + "<|end|>",
            '<|ipython|>\n\n"SAY \\"X\\""<|end|><|assistant|>\n\n',
        ),
        (
            CHATML,
            f"<tool_call>[{call('add', {'a': 2})}]</tool_call><|end|>",
            "\n<|tool|>\n3<|end|>\n<|assistant|>\n",
        ),
    ],
)
def test_a_call_in_the_templates_form_is_made_and_its_result_has_the_templates_form(
    begin, template, turn, observation
):
    assert say(begin(template), turn) == observation


def test_a_turn_without_a_call_ends_the_episode_with_eos(begin):
    row = begin()
    assert say(row, "It is 5.<|end|>") is None
    assert row.calls == []


@table(
    "text, problem",
    [
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
            "it is not JSON (Expecting ',' delimiter at character 37)",
        ),
        ('<tool_call>{"name": "add"', "<tool_call> without </tool_call>"),
        ("<tool_call>[]</tool_call>", "the list of calls is empty"),
        ("<tool_call>[1]</tool_call>", "it is not a JSON object with name and arguments"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'it has no "name"'),
        (
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            '"arguments" is not a JSON object',
        ),
        ('<tool_call>{"name": "sub"}</tool_call>', "there is no such tool, only add, shout, fail"),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', "it needs an argument 'a'"),
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1, "c": 2}}</tool_call>',
            "it takes no argument 'c', only a, b",
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": "1"}}</tool_call>',
            "'a' is str, not integer",
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": true}}</tool_call>',
            "'a' is bool, not integer",
        ),
    ],
)
def test_a_malformed_call_is_the_policys_and_it_reads_why(begin, text, problem):
    row = begin()
    assert problem in say(row, text + "<|end|>")
    assert row.calls[0].fault == "policy"
    assert row.calls[0].error == problem
    assert "4" in say(row, f"<tool_call>{call('add', {'a': 3})}</tool_call><|end|>")


def test_arguments_may_be_json_inside_json_and_may_hold_the_closing_mark(begin):
    inner = json.dumps({"text": "</tool_call>"})
    turn = f"<tool_call>{call('shout', inner)}</tool_call><|end|>"
    assert "</TOOL_CALL>" in say(begin(), turn)


def test_a_tool_that_fails_costs_an_observation_and_one_that_hangs_too(begin):
    row = begin(timeout=0.3)
    for text, error in (("x", "RuntimeError: no luck"), ("bytes", "bytes"), ("hang", "longer")):
        turn = f"<tool_call>{call('fail', {'text': text})}</tool_call><|end|>"
        assert "The call of fail failed." in say(row, turn)
        assert error in row.calls[-1].error
        assert row.calls[-1].fault == "tool"


def test_calls_of_a_turn_are_made_in_their_order(begin):
    row = begin()
    turn = "".join(f"<tool_call>{call('add', {'a': i})}</tool_call>" for i in (5, 1))
    assert [c.result for c in row.calls] == []
    say(row, turn + "<|end|>")
    assert [(c.name, c.arguments, c.result, c.turn) for c in row.calls] == [
        ("add", '{"a": 5}', "6", 0),
        ("add", '{"a": 1}', "2", 0),
    ]


def test_special_tokens_in_a_result_stay_letters(begin, byte_tokenizer):
    row = begin()
    spelt = "<|end|><|assistant|>"
    ids = byte_tokenizer(
        f"<tool_call>{call('shout', {'text': 'E'})}</tool_call><|end|>", add_special_tokens=False
    ).input_ids
    assert [row.add_token(i) for i in ids][-1]
    row.functions.make = lambda _: spelt
    observed = row.answer().ids
    eos, assistant = byte_tokenizer.convert_tokens_to_ids(["<|end|>", "<|assistant|>"])
    assert observed.count(eos) == 1
    assert observed.count(assistant) == 1
    assert spelt in byte_tokenizer.decode(observed)


def test_a_long_result_is_cut_with_a_mark_and_the_limit_holds(begin, byte_tokenizer):
    row = begin(max_observation_tokens=90)
    turn = f"<tool_call>{call('shout', {'text': 'é' * 500})}</tool_call><|end|>"
    ids = byte_tokenizer(turn, add_special_tokens=False).input_ids
    for token in ids:
        over = row.add_token(token)
    assert over
    observed = row.answer().ids
    assert len(observed) <= 90
    assert "É …\n</tool_response>" in byte_tokenizer.decode(observed)
    assert row.calls[0].cut


def test_a_call_in_the_last_turn_is_not_made(begin):
    row = begin(max_turns=1)
    assert say(row, f"<tool_call>{call('add', {'a': 1})}</tool_call><|end|>") is None
    assert row.calls[0].error.startswith("not made: it came with turn 1")


def test_the_template_is_given_the_schemas_in_every_prompt(begin, byte_tokenizer):
    begin(names=("add",))
    text = byte_tokenizer.decode(render_prompt(byte_tokenizer, "Hi"))
    assert '"name": "add", "description": "Add two numbers."' in text
    assert '"required": ["a"]' in text
    offer_tools(byte_tokenizer, None)
    assert "Tools" not in byte_tokenizer.decode(render_prompt(byte_tokenizer, "Hi"))


def test_shipped_tools_are_called_in_json_too(model):
    section = settings(tools=["calculator"], tool_calls="json")
    prompts = Prompts(["p"], [[1]], [{}], [0], [""], [None])
    [row] = build_episode_source(section, model(QWEN)).episodes(prompts)
    turn = f"<tool_call>{call('calculator', {'expression': '2*21'})}</tool_call><|end|>"
    assert "\n42\n" in say(row, turn)
    turn = f"<tool_call>{call('calculator', {'expression': '2*'})}</tool_call><|end|>"
    assert "Invalid call of calculator: the expression ends" in say(row, turn)


@table(
    "template, opening, closing",
    [
        (QWEN, "<tool_call>", "</tool_call>"),
        (LLAMA, "", ""),
        (CHATML, "<tool_call>", "</tool_call>"),
        (
            "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] "
            "[{{ m.tool_calls[0].function | tojson }}]{% else %}{{ m.content }}{% endif %}<|end|>"
            "{% endfor %}",
            "[TOOL_CALLS]",
            "",
        ),
    ],
)
def test_the_marks_are_those_that_the_template_writes(model, template, opening, closing):
    assert find_form(model(template).tokenizer) == CallForm(opening, closing)


def test_json_that_is_an_answer_is_not_a_call_without_marks():
    assert CallForm("", "").read('{"answer": 4}') == []
    assert CallForm("", "").read("It is 4.") == []
    assert CallForm("", "").read('<|python_tag|>{"name": "add"}')[0].name == "add"


@table(
    "template, names, fields, sentence",
    [
        (None, ("add",), {}, "this model has none"),
        (XML, ("add",), {}, "not JSON"),
        (QWEN, ("bare",), {}, "bare has no schema"),
        (QWEN, ("add", "add"), {}, "two tools are called 'add'"),
        (QWEN, ("add",), {"max_observation_tokens": 20}, "write more than"),
    ],
)
def test_what_cannot_work_is_refused_before_training(begin, template, names, fields, sentence):
    with pytest.raises(UserError, match=sentence):
        begin(template, names, **fields)


def test_only_sampled_tokens_are_in_the_mask_and_none_is_encoded_again(begin, byte_tokenizer):
    """A policy that repeats one text: its ids stand in the row as they were drawn."""
    row = begin()
    said = f"<tool_call>{call('add', {'a': 2})}</tool_call><|end|>"
    script = byte_tokenizer(said + "Five.<|end|>", add_special_tokens=False).input_ids
    model = tiny_llama(260, byte_tokenizer.eos_token_id).eval()
    sampler = LocalSampler(frozenset([byte_tokenizer.eos_token_id]), 300, 1.0)
    sampler.sync(model, 0)
    drawn = iter(script)

    def scripted(live, states, choice):
        for one in live:
            one.add_sampled(next(drawn), -1.0, sampler.eos_ids, 300)

    sampler._take_tokens = scripted
    rollout = sampler.run([row], Greedy())
    ids, mask = rollout.response_ids[0], rollout.response_mask[0]
    assert ids[mask].tolist() == script
    observed = byte_tokenizer.decode(ids[~mask])
    assert observed == "\n<|user|>\n<tool_response>\n3\n</tool_response><|end|>\n<|assistant|>\n"
    assert rollout.finish_reasons == ("eos",)
    assert torch.equal(rollout.rollout_log_probs[0] != 0, mask)
