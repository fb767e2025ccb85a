"""Tool calls as chat models write them: JSON, with or without marks, by the model's own template.

    Qwen, Hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, one or more
    Llama 3        {"name": "add", "parameters": {"a": 1}} and nothing else
    SmolLM2        <tool_call>[{"name": "add", "arguments": {"a": 1}}, …]</tool_call>
    Mistral        [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, …]

Which marks a model has is read from what its template writes for a call. All these shapes are then
read; only the marks differ.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.data.chat_templates import TemplateFailed, render_chat
from tether.data.messages import Piece, Rendered, plain_text
from tether.errors import UserError
from tether.models.vocabulary import decode
from tether.rollout.turn_tokens import CUT, LONGEST_TOKEN

NAME, ASKED, SAID = "Qname3", "Qask0", "Qsaid1"  # stand-ins; letters that no template changes
PYTHON_TAG = "<|python_tag|>"  # which Llama 3 may write before a call
UNNAMED = "tool"  # what a call without a readable name is called
DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class FunctionCall:
    """A call as the policy wrote it; `problem` says why it cannot be made."""

    name: str
    text: str
    arguments: Mapping[str, Any]
    problem: str | None = None


@dataclass(frozen=True)
class CallForm:
    """The marks around a call. Without an opening one, a call is all that a turn says."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"

    def read(self, turn: str) -> list[FunctionCall]:
        """Return the calls of a turn in their order; none if it makes no call."""
        if not self.opening:
            text = turn.strip().removeprefix(PYTHON_TAG).strip()
            looks = text.startswith(("{", "[{")) and '"name"' in text
            return _calls(text, *_decoded(text)) if looks else []
        found: list[FunctionCall] = []
        at = turn.find(self.opening)
        while at >= 0:
            at += len(self.opening)
            calls, at = self._read_at(turn, at)
            found += calls
            at = turn.find(self.opening, at)
        return found

    def _read_at(self, turn: str, at: int) -> tuple[list[FunctionCall], int]:
        """Return the calls after an opening mark, and where they end."""
        text = turn[at:].lstrip()
        at = len(turn) - len(text)
        value, end = _decoded(text)
        rest = text[end:].lstrip()
        if value is not None and (rest.startswith(self.closing) or not self.closing):
            return _calls(text[:end], value, end), len(turn) - len(rest) + len(self.closing)
        end = text.find(self.closing) if self.closing else len(text)
        if end < 0:
            why = f"{self.opening} without {self.closing}"
            return [FunctionCall(UNNAMED, text, {}, why)], len(turn)
        return _calls(text[:end].strip(), None, end), at + end + len(self.closing)


def _decoded(text: str) -> tuple[Any, int]:
    """Return the JSON value that a text begins with, and its length; None, 0 if there is none."""
    try:
        return DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


def _calls(text: str, value: Any, end: int) -> list[FunctionCall]:
    """Return the calls of a JSON object, or of a list of them."""
    if value is None or text[end:].strip():
        return [FunctionCall(UNNAMED, text, {}, f"it is not JSON{_where(text)}")]
    items = value if isinstance(value, list) else [value]
    if not items:
        return [FunctionCall(UNNAMED, text, {}, "the list of calls is empty")]
    return [_call(item) for item in items]


def _where(text: str) -> str:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f" ({error.msg} at character {error.pos})"
    except (ValueError, RecursionError):
        pass
    return ""


def _call(item: Any) -> FunctionCall:
    text = json.dumps(item, ensure_ascii=False)
    if not isinstance(item, dict):
        return FunctionCall(UNNAMED, text, {}, "it is not a JSON object with name and arguments")
    item = item["function"] if isinstance(item.get("function"), dict) else item
    name = item.get("name")
    if not isinstance(name, str) or not name:
        return FunctionCall(UNNAMED, text, {}, 'it has no "name"')
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):  # JSON inside JSON, as OpenAI's servers have it
        arguments = _decoded(arguments.strip())[0]
    arguments = {} if arguments is None and "arguments" not in item else arguments
    if not isinstance(arguments, dict):
        return FunctionCall(name, text, {}, '"arguments" is not a JSON object')
    return FunctionCall(name, json.dumps(arguments, ensure_ascii=False), arguments)


def find_form(tokenizer: PreTrainedTokenizerBase) -> CallForm:
    """Return the marks that the chat template writes around a call.

    A template that writes no calls at all leaves `<tool_call>`, which most models know.
    """
    user = {"role": "user", "content": ASKED}
    called = {"role": "assistant", "content": "", "tool_calls": [_stand_in(NAME)]}
    try:
        said = render_chat(tokenizer, [user, {"role": "assistant", "content": SAID}], False)
        text = render_chat(tokenizer, [user, called], False)
    except TemplateFailed:
        return CallForm()
    before, _, after = said.partition(SAID)
    if NAME not in text or not text.startswith(before):
        return CallForm()
    for at in _objects_before(text, text.index(NAME)):
        value, end = _decoded(text[at:])
        if isinstance(value, dict) and NAME in (value.get("name"), _inner_name(value)):
            opening, closing = text[len(before) : at], text[at + end :].removesuffix(after)
            return CallForm(opening.strip().rstrip("[").strip(), closing.lstrip("] \n").strip())
    raise UserError(
        "The model's chat template writes tool calls in a form that is not JSON; leave out "
        "rollout.tool_calls, or use a model of the form of Qwen 2.5, Qwen 3 or Llama 3."
    )


def _stand_in(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {}}}


def _inner_name(value: Mapping[str, Any]) -> Any:
    inner = value.get("function")
    return inner.get("name") if isinstance(inner, dict) else None


def _objects_before(text: str, end: int) -> Iterator[int]:
    """Yield where a brace opens before `end`, the outermost first."""
    return (at for at in range(end) if text[at] == "{")


Way = Callable[[str], str]


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# What templates do with the content of a tool's message; Llama 3 writes it as JSON.
WAYS: tuple[Way, ...] = (str, str.strip, _as_json)


class ToolMessages:
    """Encodes what calls returned as the template's messages of the role `tool`.

    A template is asked once per list of names, with stand-ins for a dialogue; what it writes after
    the assistant's EOS is put around the results. A template that does not know the role shows them
    as the user's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.spelt_eos = [decode(tokenizer, [i]) for i in sorted(eos_ids)]
        self._outlines: dict[tuple[str, ...], tuple[list[str], Way]] = {}
        self.outline((UNNAMED,))  # a template that cannot is refused before training

    def ids(self, names: Sequence[str], texts: Sequence[str]) -> list[int]:
        """Return the ids from after the EOS of the turn to where the next begins."""
        around, way = self.outline(tuple(names))
        pieces = [Piece(around[0], by_template=True)]
        for text, after in zip(texts, around[1:], strict=True):
            pieces += [Piece(way(text), by_template=False), Piece(after, by_template=True)]
        return Rendered(tuple(piece for piece in pieces if piece.text)).ids(self.tokenizer)

    def cut(self, text: str, limit: int) -> tuple[str, bool]:
        """Return a result cut to `limit` tokens with the template's own, and whether it was."""
        text = text.encode(errors="replace").decode()  # a lone surrogate is in no vocabulary
        room = limit - self.overhead
        read = text[: limit * LONGEST_TOKEN]
        ids = plain_text(read).ids(self.tokenizer)
        if read == text and len(ids) <= room:
            return text, False
        mark = len(plain_text(CUT).ids(self.tokenizer))
        return decode(self.tokenizer, ids[: max(0, room - mark)]).rstrip("\ufffd") + CUT, True

    @property
    def overhead(self) -> int:
        """Tokens that the template writes around one result."""
        around, _ = self.outline((UNNAMED,))
        return len(Rendered((Piece("".join(around), by_template=True),)).ids(self.tokenizer))

    def check_room(self, limit: int) -> None:
        """Refuse, before training, a limit that leaves no token for a result."""
        least = self.overhead + len(plain_text(CUT).ids(self.tokenizer))
        if least >= limit:
            raise UserError(
                f"rollout.max_observation_tokens = {limit} does not hold what the chat template "
                f"writes around a tool's result, and the mark of a cut, which are {least} tokens; "
                f"write more than {least}."
            )

    def outline(self, names: tuple[str, ...]) -> tuple[list[str], Way]:
        """Return the template's texts before, between and after the results of these tools, and
        what it does with a result."""
        if names not in self._outlines:
            found = self._outline(names, "tool") or self._outline(names, "user")
            if found is None:
                raise UserError(
                    "The model's chat template cannot render the result of a tool after its call; "
                    "use another model, or leave out rollout.tool_calls."
                )
            self._outlines[names] = found
        return self._outlines[names]

    def _outline(self, names: Sequence[str], role: str) -> tuple[list[str], Way] | None:
        seen = [f' Qseen{i}."\n' for i in range(len(names))]
        called = {"role": "assistant", "content": "", "tool_calls": [_stand_in(names[0])]}
        results = [
            {"role": "tool", "name": n, "content": s} for n, s in zip(names, seen, strict=False)
        ]
        if role == "user":  # roles may have to alternate
            called = {"role": "assistant", "content": SAID}
            results = [{"role": "user", "content": "".join(seen)}]
        dialogue = [{"role": "user", "content": ASKED}, called]
        try:
            before = render_chat(self.tokenizer, dialogue, False)
            text = render_chat(self.tokenizer, [*dialogue, *results], True)
        except TemplateFailed:
            return None
        # From after the last EOS before the first result; without one, from what is new.
        head = text.partition("Qseen0")[0]
        ends = [head.rfind(eos) + len(eos) for eos in self.spelt_eos if eos in head]
        if not ends and not text.startswith(before):
            return None
        return _split(text[max(ends, default=len(before)) :], seen)


def _split(text: str, seen: Sequence[str]) -> tuple[list[str], Way] | None:
    """Return the parts of a text around stand-ins, and what was done to them."""
    for way in WAYS:
        parts, rest = [], text
        for shown in map(way, seen):
            part, found, rest = rest.partition(shown)
            if not found:
                break
            parts.append(part)
        if len(parts) == len(seen):
            return [*parts, rest], way
    return None
