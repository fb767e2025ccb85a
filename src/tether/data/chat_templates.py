"""Render a model's chat template: a program that came with the model, and is not trusted.

A template that ships with tether is rendered in this process. Any other is rendered by one child
process (`python -m tether.data.chat_templates IN OUT`), which is killed when a rendering takes
longer than `SECONDS`, gets no more than `MEMORY` bytes for it, and refuses a text that is much
longer than the messages it was made from.
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from tether import assets
from tether.errors import UserError, one_line
from tether.support.child_process import (
    Answer,
    ChildEnded,
    ChildFailed,
    ChildProcess,
    ChildTimedOut,
    Respond,
    limit_memory,
    serve,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 5.0  # wall clock of one rendering; an ordinary one takes less than a millisecond
START_SECONDS = 120.0  # that the child has to import transformers
MEMORY = 512 << 20  # bytes of address space beyond what the child holds before it renders
EXTRA_CHARACTERS = 1 << 20  # that a template may write beside GROWTH times the messages
GROWTH = 4
TIME_ATTRIBUTE = "template_time"  # of a tokenizer: what `fix_date` set
TOOLS_ATTRIBUTE = "template_tools"  # of a tokenizer: what `offer_tools` set
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

    `now` is what the template's `strftime_now` reads; by default the day that `fix_date` set for
    the tokenizer, or else the clock. Raises `TemplateFailed` where the template raises, and
    `TemplateTooCostly` where it exceeds a limit.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several templates, and none is the default
        raise TemplateFailed(one_line(error)) from None
    now = now or getattr(tokenizer, TIME_ATTRIBUTE, None)
    request = {
        "template": template,
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "variables": dict(tokenizer.special_tokens_map),
        "tools": getattr(tokenizer, TOOLS_ATTRIBUTE, None),
        "now": None if now is None else now.isoformat(),
    }
    if template not in _shipped_templates():
        return _renderer.render(request)
    try:
        return _render(request)
    except Exception as error:  # a template may raise anything, such as over the order of roles
        raise TemplateFailed(one_line(error)) from None


def asks_for_date(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether the chat template reads the clock."""
    return "strftime_now" in str(tokenizer.chat_template)


def fix_date(tokenizer: "PreTrainedTokenizerBase", day: date | None) -> None:
    """Make the tokenizer's chat template read midnight of this day from now on."""
    now = None if day is None else datetime(day.year, day.month, day.day)
    setattr(tokenizer, TIME_ATTRIBUTE, now)


def offer_tools(
    tokenizer: "PreTrainedTokenizerBase", schemas: Sequence[Mapping[str, Any]] | None
) -> None:
    """Hand these tools to the tokenizer's chat template from now on, as its variable `tools`."""
    setattr(tokenizer, TOOLS_ATTRIBUTE, None if not schemas else [dict(one) for one in schemas])


def render_chats(
    tokenizer: "PreTrainedTokenizerBase", conversations: Sequence[Sequence[Mapping[str, str]]]
) -> list[str] | None:
    """Return many conversations as text up to where the response begins, in a tenth of the time.

    Messages have only a role and a content. Returns None where one of them fails or exceeds a
    limit: `render_chat`, called for one at a time, then finds out which, and says why.
    """
    template, now = tokenizer.chat_template, getattr(tokenizer, TIME_ATTRIBUTE, None)
    # The clock could strike between two of them; a day that was fixed cannot.
    if not isinstance(template, str) or (now is None and asks_for_date(tokenizer)):
        return None
    request = {
        "template": template,
        "conversations": conversations,
        "tools": getattr(tokenizer, TOOLS_ATTRIBUTE, None),
        "now": None if now is None else now.isoformat(),
        "variables": dict(tokenizer.special_tokens_map),
    }
    if template not in _shipped_templates():
        return _renderer.render_many(request)
    try:
        return list(_render_many(request))
    except Exception:  # `render_chat` says what the template raised
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
        tools=request["tools"],
        chat_template=request["template"],
        add_generation_prompt=request["add_generation_prompt"],
        **request["variables"],
    )
    return text


def _render_many(request: Mapping[str, Any]) -> Iterator[str]:
    """Render each conversation as `_render` would. Most of its time goes into copying what is the
    same for all of them; that is prepared once here."""
    from transformers.utils import chat_template_utils as theirs

    compiled = theirs._compile_jinja_template(request["template"])
    known = {**compiled.globals, **request["variables"]}
    if request["now"] is not None:
        known["strftime_now"] = datetime.fromisoformat(request["now"]).strftime
    known |= {"add_generation_prompt": True, "tools": request["tools"], "documents": None}
    for messages in request["conversations"]:
        context = compiled.new_context({**known, "messages": messages}, shared=True)
        yield "".join(compiled.root_render_func(context))


class _Renderer:
    """The child that renders, started when it is first needed and again after it was killed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.child: ChildProcess | None = None

    def render(self, request: Mapping[str, Any]) -> str:
        with self._asking(request) as receive:
            answer = receive()
        if "too_costly" in answer:
            raise TemplateTooCostly(f"The model's chat template {answer['too_costly']}.")
        if "error" in answer:
            raise TemplateFailed(answer["error"])
        return answer["text"]

    def render_many(self, request: Mapping[str, Any]) -> list[str] | None:
        texts: list[str] = []
        try:
            with self._asking(request) as receive:
                for _ in request["conversations"]:
                    answer = receive()
                    if "text" not in answer:
                        return None  # the child sends no more
                    texts.append(answer["text"])
        except TemplateTooCostly:
            return None
        return texts

    @contextlib.contextmanager
    def _asking(self, request: Mapping[str, Any]) -> Iterator[Callable[[], Answer]]:
        """Send a request; yield what returns the next answer, for which the child has `SECONDS`."""
        with self.lock:
            child = self._usable_child()
            try:
                child.send([json.dumps(request)])
                yield lambda: child.receive(SECONDS)
            except BaseException as error:  # answers may be under way: the next request starts anew
                child.kill()
                self.child = None
                if not isinstance(error, ChildFailed):
                    raise
                raise TemplateTooCostly(
                    f"The model's chat template {_why(error)}; repair it, or use another model."
                ) from None

    def _usable_child(self) -> ChildProcess:
        if self.child is not None and self.child.usable:
            return self.child
        if self.child is not None:
            self.child.kill()
        self.child = ChildProcess(
            "tether.data.chat_templates",
            name="the chat template",
            seconds=START_SECONDS,
            # transformers is used for its templates alone; torch takes seconds to import.
            environment={**os.environ, "USE_TORCH": "0", "HF_HUB_OFFLINE": "1"},
        )
        return self.child


_renderer = _Renderer()


def _why(error: ChildFailed) -> str:
    match error:
        case ChildTimedOut():
            return f"takes longer than {SECONDS:g} s to render one prompt"
        case ChildEnded():
            return f"ended the process that renders it (exit code {error.code})"
    return f"failed in the process that renders it ({error})"


def _set_up(_: object) -> Respond:
    """Prepare the child; return what answers a request."""
    import transformers.utils.chat_template_utils  # noqa: F401 (before memory is limited)

    limit_memory(MEMORY)

    def respond(line: str) -> Iterator[Answer]:
        request = json.loads(line)
        if "conversations" in request:
            yield from _answer_many(request, len(line))
        else:
            yield _answer(request, len(line))

    return respond


def _answer(request: Mapping[str, Any], size: int) -> Answer:
    try:
        text = _render(request)
    except MemoryError:
        return {"too_costly": f"needs more than {MEMORY >> 20} MiB of memory to render one prompt"}
    except Exception as error:  # a template may raise anything
        return {"error": one_line(error)}
    if len(text) > EXTRA_CHARACTERS + GROWTH * size:
        return {"too_costly": f"made {len(text):,} characters of a prompt of {size:,}"}
    return {"text": text}


def _answer_many(request: Mapping[str, Any], size: int) -> Iterator[Answer]:
    """Answer once per conversation, so that each has the time limit to itself."""
    written = 0
    try:
        for text in _render_many(request):
            written += len(text)
            if written > EXTRA_CHARACTERS + GROWTH * size:
                break
            yield {"text": text}
        else:
            return
    except Exception:  # `render_chat` says what the template raised
        pass
    yield {"failed": True}


if __name__ == "__main__":
    serve(_set_up)
