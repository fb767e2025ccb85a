"""Chat templates are programs of strangers: bounded in time, memory and what they write."""

import signal
from contextlib import contextmanager

import pytest

from tether.config import DataSection
from tether.data import chat_templates
from tether.data.messages import render_prompt
from tether.data.prompts import load_prompts
from tether.errors import UserError

# One that does not ship with tether: the starter's would be rendered in this process.
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = (
    "{% set ns = namespace(x=messages[0].content) %}"
    "{% for i in range(29) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
)
PADS = "{{ messages[0].content.center(900000000) }}"
REPEATS = "{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}{{ messages[0].content }}"


@contextmanager
def within(seconds: float):
    """Fail where a template runs on in this process."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def with_template(tokenizer, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    return tokenizer


def test_a_template_that_loops_is_ended_and_the_next_prompt_renders(byte_tokenizer, monkeypatch):
    # So that starting the child is not in the time below.
    render_prompt(with_template(byte_tokenizer, monkeypatch, PLAIN), "hi")
    with within(20), pytest.raises(UserError, match=r"takes longer than 5 s"):
        render_prompt(with_template(byte_tokenizer, monkeypatch, LOOPS), "hi")
    ids = render_prompt(with_template(byte_tokenizer, monkeypatch, PLAIN), "hi")
    assert byte_tokenizer.decode(ids) == "<user>hi"


@pytest.mark.parametrize("template", [DOUBLES, PADS])
def test_a_template_that_grows_is_refused_for_its_memory(byte_tokenizer, monkeypatch, template):
    monkeypatch.setattr(
        chat_templates, "SECONDS", 60.0
    )  # on a busy machine it may need more than 5
    with within(60), pytest.raises(UserError, match=r"more than \d+ MiB of memory"):
        render_prompt(with_template(byte_tokenizer, monkeypatch, template), "hi")


def test_a_template_that_writes_far_more_than_it_was_given_is_refused(byte_tokenizer, monkeypatch):
    with pytest.raises(UserError, match=r"made 9,999,902 characters of a prompt"):
        render_prompt(with_template(byte_tokenizer, monkeypatch, REPEATS), "hi")


def test_a_hostile_template_is_no_bad_row_to_be_skipped(byte_tokenizer, monkeypatch, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 1000)
    data = DataSection(train=str(tmp_path / "rows.jsonl"), on_bad_row="skip")
    with within(20), pytest.raises(UserError, match=r"^The model's chat template needs more than"):
        load_prompts(data.train, data, with_template(byte_tokenizer, monkeypatch, DOUBLES))


def test_the_child_renders_what_transformers_renders(byte_tokenizer, monkeypatch):
    template = (
        "{{ bos_token }}{%- for m in messages if m.content is string %}\n"
        "{% if not loop.first %}{% continue %}{% endif %}"
        "[{{ m.role }}] {{ m.content | trim }} {{ m | tojson }}{{ eos_token }}\n"
        "{%- endfor %}{% if add_generation_prompt %}[é]{% endif %}"
    )
    from tether.data.chat_templates import render_chat

    tokenizer = with_template(byte_tokenizer, monkeypatch, template)
    messages = [{"role": "user", "content": " naïve \u2028 "}, {"role": "user", "content": "b"}]
    for generation in (True, False):
        expected = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation
        )
        assert render_chat(tokenizer, messages, generation) == expected
