"""Render a model's chat template: a program that came with the model, and is not trusted.

A template that ships with tether is rendered in this process. Any other is rendered by one child
process (`python -m tether.data.chat_templates`), which ends when a rendering takes longer than
`SECONDS`, gets no more than `MEMORY` bytes for it, and refuses a text that is much longer than
the messages it was made from. Requests and answers are JSON lines on its stdin and stdout.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether import assets
from tether.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 5.0  # wall clock of one rendering; an ordinary one takes less than a millisecond
MEMORY = 512 << 20  # bytes of address space beyond what the child holds before it renders
EXTRA_CHARACTERS = 1 << 20  # that a template may write beside GROWTH times the messages
GROWTH = 4
SHIPPED = ("starter", "search_starter")


class TemplateFailed(Exception):
    """The template does not render these messages; the message says why."""


class TemplateTooCostly(UserError):
    """The template exceeds a limit. The model is at fault, not the row, so no row is skipped."""


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    now: datetime | None = None,
) -> str:
    """Return the messages as text under the tokenizer's chat template.

    `now` is what the template's `strftime_now` reads; None is the day that `fix_date` set for the
    tokenizer, else the clock. Raises `TemplateFailed`
    where the template raises, and `TemplateTooCostly` where it exceeds a limit.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several templates, and none is the default
        raise TemplateFailed(one_line(error)) from None
    now = now or getattr(tokenizer, "template_time", None)
    request = {
        "template": template,
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "variables": dict(tokenizer.special_tokens_map),
        "now": None if now is None else now.isoformat(),
        "seconds": SECONDS,
    }
    if template not in _shipped_templates():
        return _child.render(request)
    try:
        return _render(request)
    except Exception as error:  # such as a `raise_exception` over the order of roles
        raise TemplateFailed(one_line(error)) from None


def asks_for_date(tokenizer: "PreTrainedTokenizerBase") -> bool:
    return "strftime_now" in str(tokenizer.chat_template)


def fix_date(tokenizer: "PreTrainedTokenizerBase", day: date | None) -> None:
    """Let the tokenizer's chat template read this day from now on, at midnight."""
    tokenizer.template_time = None if day is None else datetime(day.year, day.month, day.day)


def render_chats(
    tokenizer: "PreTrainedTokenizerBase", conversations: Sequence[Sequence[Mapping[str, str]]]
) -> list[str] | None:
    """Return many conversations as text up to where the response begins, in a tenth of the time.

    Messages have a role and a content and no more. None where one of them fails or exceeds a
    limit: `render_chat`, asked for one at a time, finds out which, and says why.
    """
    template, now = tokenizer.chat_template, getattr(tokenizer, "template_time", None)
    # The clock could strike between two of them; a day that was fixed cannot.
    if not isinstance(template, str) or (now is None and asks_for_date(tokenizer)):
        return None
    request = {
        "template": template,
        "conversations": conversations,
        "now": None if now is None else now.isoformat(),
        "variables": dict(tokenizer.special_tokens_map),
        "seconds": SECONDS,
    }
    if template not in _shipped_templates():
        return _child.render_many(request)
    try:
        return list(_render_many(request))
    except Exception:
        return None


@cache
def _shipped_templates() -> frozenset[str]:
    files = [assets.resolve(f"tether:{name}") / "tokenizer_config.json" for name in SHIPPED]
    return frozenset(json.loads(path.read_bytes())["chat_template"] for path in files)


def _render(request: Mapping[str, Any]) -> str:
    """Render in this process, with transformers' own sandbox and names."""
    from transformers.utils import chat_template_utils as theirs

    now = None if request["now"] is None else datetime.fromisoformat(request["now"])
    compiled = theirs._compile_jinja_template(request["template"])
    # The compiled template is cached, so the clock has to be put back as well.
    compiled.globals["strftime_now"] = (now or datetime.now()).strftime
    [text], _ = theirs.render_jinja_template(
        conversations=[request["messages"]],
        chat_template=request["template"],
        add_generation_prompt=request["add_generation_prompt"],
        **request["variables"],
    )
    return text


def _render_many(request: Mapping[str, Any]) -> Iterator[str]:
    """Render each conversation as `_render` would. Most of its time goes into copying what is the
    same for all of them; here that is made ready once."""
    from transformers.utils import chat_template_utils as theirs

    compiled = theirs._compile_jinja_template(request["template"])
    known = {**compiled.globals, **request["variables"]}
    if request["now"] is not None:
        known["strftime_now"] = datetime.fromisoformat(request["now"]).strftime
    known |= {"add_generation_prompt": True, "tools": None, "documents": None}
    for messages in request["conversations"]:
        context = compiled.new_context({**known, "messages": messages}, shared=True)
        yield "".join(compiled.root_render_func(context))


class _Child:
    """The process that renders, started when it is first needed and again after it was ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0  # a fork of this process must not share the pipes

    def render(self, request: Mapping[str, Any]) -> str:
        said = self._ask(request)
        if "too_costly" in said:
            raise TemplateTooCostly(f"The model's chat template {said['too_costly']}.")
        if "error" in said:
            raise TemplateFailed(said["error"])
        return said["text"]

    def render_many(self, request: Mapping[str, Any]) -> list[str] | None:
        try:
            return self._ask(request).get("texts")
        except TemplateTooCostly:
            return None

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        line = json.dumps(request).encode() + b"\n"
        with self.lock:
            process = self._running()
            with contextlib.suppress(BrokenPipeError):  # the missing answer says the same
                process.stdin.write(line)
                process.stdin.flush()
            answer = process.stdout.readline()
            if not answer.endswith(b"\n"):
                self.process = None
                raise TemplateTooCostly(_why_it_ended(process.wait()))
        return json.loads(answer)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self.process is None or self.owner != os.getpid():
            # transformers is wanted for its templates alone; torch would take seconds to import.
            environment = {**os.environ, "USE_TORCH": "0", "HF_HUB_OFFLINE": "1"}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tether.data.chat_templates"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent; its end closes the pipe
            )
            self.owner = os.getpid()
        return self.process


_child = _Child()


def _why_it_ended(code: int) -> str:
    if code == -signal.SIGALRM:
        what = f"takes longer than {SECONDS:g} s to render one prompt"
    else:
        what = f"ended the process that renders it (exit code {code})"
    return f"The model's chat template {what}; repair it, or use another model."


def main() -> None:
    """Answer requests until stdin closes."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # nothing but answers on the pipe
        import transformers.utils.chat_template_utils  # noqa: F401 (before memory is limited)

        _limit_memory()
        for line in sys.stdin.buffer:
            request = json.loads(line)
            answer = _answer_many if "conversations" in request else _answer
            said = answer(request, len(line))
            answers.write(json.dumps(said) + "\n")
            answers.flush()


def _answer(request: Mapping[str, Any], size: int) -> dict[str, str]:
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        text = _render(request)
    except MemoryError:
        return {"too_costly": f"needs more than {MEMORY >> 20} MiB of memory to render one prompt"}
    except Exception as error:  # a template may raise anything
        return {"error": one_line(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if len(text) > EXTRA_CHARACTERS + GROWTH * size:
        return {"too_costly": f"made {len(text):,} characters of a prompt of {size:,}"}
    return {"text": text}


def _answer_many(request: Mapping[str, Any], size: int) -> dict[str, Any]:
    texts, written = [], 0
    try:
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        for text in _render_many(request):
            written += len(text)
            if written > EXTRA_CHARACTERS + GROWTH * size:
                return {}
            texts.append(text)
            signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    except Exception:  # one at a time it will be said
        return {}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return {"texts": texts}


def _limit_memory() -> None:
    """Linux says how much there is already; elsewhere only time and length are limited."""
    sizes = Path("/proc/self/statm")
    if sizes.is_file():
        import resource

        here = int(sizes.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (here + MEMORY, here + MEMORY))


if __name__ == "__main__":
    main()
