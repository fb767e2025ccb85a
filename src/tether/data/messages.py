"""Prompts as messages, and messages as ids by the chat template, so that text stays text.

A template writes special tokens, such as the mark that begins a turn. Text may spell the same
marks (`<|end|><|user|>`), and a tokenizer that reads both in one string cannot tell them apart. So
the template's text and that of messages stay separate until they are ids: a piece of `Rendered` is
one or the other. Where no text spells a special token, the ids are those of `apply_chat_template`.
"""

import copy
import re
import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from tether.data.chat_templates import TemplateFailed, render_chat
from tether.data.files import BadRow
from tether.errors import UserError

# What TRL's trainers pass to a reward besides prompts, completions and columns.
TRL_EXTRAS = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
LONGEST_NAMES = 200  # characters of column names that a sentence quotes

Message = dict[str, Any]
Prompt = str | list[Message]


def parse_prompt(row: Mapping[str, Any], column: str) -> Prompt:
    """Return the row's prompt: text, or messages as chat models take them."""
    if column not in row:
        raise BadRow(
            f"it has no column {column!r} (it has {column_names(row)}); set data.prompt_column."
        )
    prompt = row[column]
    if isinstance(prompt, str):
        check_text("the prompt", prompt)
        return prompt
    if not isinstance(prompt, list):
        raise BadRow(
            f"{column!r} is {type(prompt).__name__}, not text; write text or a list of messages."
        )
    if not prompt:
        raise BadRow("the prompt is empty; write at least one message.")
    messages = [_message(message, number) for number, message in enumerate(prompt, start=1)]
    if messages[-1]["role"] == "assistant":
        raise BadRow("the last message is the assistant's; end with what it has to answer.")
    return messages


def _message(message: Any, number: int) -> Message:
    what = f"message {number} of the prompt"
    if not isinstance(message, dict):
        raise BadRow(f"{what} is {type(message).__name__}, not an object with role and content.")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            kind = type(message[key]).__name__ if key in message else "missing"
            raise BadRow(f"{what}: its {key} is {kind}, not text.")
    check_text(what, message["content"])
    # In parquet every message has the keys of all: those it does not use are null.
    return {key: value for key, value in message.items() if value is not None}


def check_text(what: str, text: str) -> None:
    """Raise `BadRow` for text that is empty or cannot be encoded."""
    if not text.strip():
        raise BadRow(f"{what} is empty.")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise BadRow(f"{what} holds half a surrogate pair, which is not text.")


def without_chat_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that reads prompts as plain text; the one given keeps its template."""
    plain = copy.copy(tokenizer)
    plain.chat_template = None
    return plain


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt for people: the only message's content, or role and content of each."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def reward_columns(
    row: Mapping[str, Any], prompt_column: str, renamed: Mapping[str, str]
) -> dict[str, Any]:
    """Return what the reward can ask for besides the prompt.

    `renamed` gives a column a second name. verl keeps the right answer inside `reward_model`, and
    its rewards ask for `ground_truth`.
    """
    columns = {name: value for name, value in row.items() if name != prompt_column}
    nested = row.get("reward_model")
    if isinstance(nested, dict) and "ground_truth" in nested:
        columns.setdefault("ground_truth", nested["ground_truth"])
    found = {name: _look_up(columns, path) for name, path in renamed.items()}
    return {**columns, **found} if found else columns


def _look_up(columns: Mapping[str, Any], path: str) -> Any:
    """Return a column by its name, or a value inside one: `reward_model.style`."""
    if path in columns:
        return columns[path]
    value: Any = columns
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise BadRow(
                f"data.columns asks for {path!r}, but it has only {column_names(columns)}."
            )
        value = value[name]
    return value


def require_columns(wanted: Sequence[str], columns: Mapping[str, Any]) -> None:
    """Raise `BadRow` for a missing column. Null counts as missing: parquet has no empty cell."""
    for name in wanted:
        if columns.get(name) is None:
            if name in TRL_EXTRAS and name not in columns:
                raise BadRow(
                    f"the reward asks for {name!r}, which TRL passes and tether does not; give "
                    f"the parameter a default, or take it by **kwargs."
                )
            state = (
                "it is null there" if name in columns else f"it has only {column_names(columns)}"
            )
            raise BadRow(
                f"the reward asks for {name!r}, but {state}; add it, or name the column that holds "
                f"it as --data.columns.{name} COLUMN."
            )


def column_names(row: Mapping[str, Any]) -> str:
    """Return the names of a row's columns on one line."""
    found = " ".join(", ".join(row).split()) or "none"
    return found if len(found) <= LONGEST_NAMES else f"{found[:LONGEST_NAMES]} …"


class Piece(NamedTuple):
    """Text from one source."""

    text: str
    by_template: bool  # True: special tokens in it are meant; False: they are letters


@dataclass(frozen=True)
class Rendered:
    """What a model will read, in pieces."""

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """All pieces as one string."""
        return "".join(piece.text for piece in self.pieces)

    def __add__(self, other: "Rendered") -> "Rendered":
        return Rendered((*self.pieces, *other.pieces))

    def after(self, length: int) -> "Rendered":
        """Return it without its first `length` characters."""
        rest = []
        for piece in self.pieces:
            if piece.text[length:]:
                rest.append(Piece(piece.text[length:], piece.by_template))
            length = max(0, length - len(piece.text))
        return Rendered(tuple(rest))

    def without_leading(self, mark: str) -> "Rendered":
        """Return it without `mark` at its beginning, if the template wrote it there."""
        if not self.pieces or not self.pieces[0].by_template:
            return self
        return self.after(len(mark)) if self.pieces[0].text.startswith(mark) else self

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return its ids, without special tokens that a tokenizer may add: the template has its
        own."""
        special = special_tokens(tokenizer)
        if not any(special.spelt_in(p.text) for p in self.pieces if not p.by_template):
            return tokenizer(self.text, add_special_tokens=False).input_ids
        return special.encode(self.pieces)


def plain_text(text: str) -> Rendered:
    """Return text in which special tokens are letters."""
    return Rendered((Piece(text, by_template=False),))


def template_text(text: str) -> Rendered:
    """Return text in which special tokens are meant."""
    return Rendered((Piece(text, by_template=True),))


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of plain text; special tokens that it spells are letters."""
    return plain_text(text).ids(tokenizer)


class SpecialTokens:
    """The special tokens of a tokenizer, and how to read text that spells them.

    Special tokens of the template are replaced by random stand-ins, which no text can spell, for a
    copy of the tokenizer that knows the stand-ins and reads special tokens as letters. So the whole
    is encoded at once, and no token at a border changes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        known = tokenizer.added_tokens_decoder
        self.ids: dict[str, int] = {t.content: i for i, t in known.items() if t.special}
        self._tokens = {token.content: token for token in known.values() if token.special}
        # The longest first, as tokenizers match them.
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # A weak reference: this object is cached for as long as its tokenizer lives.
        self._tokenizer = weakref.ref(tokenizer)
        self._copy: PreTrainedTokenizerBase | None = None
        self._stand_ins: dict[str, str] = {}
        self._original: dict[int, int] = {}

    def spelt_in(self, text: str) -> bool:
        """Return whether a text spells a special token."""
        return self._pattern.search(text) is not None

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the ids of pieces of which some text spells a special token."""
        reader = self._reader()
        whole = "".join(
            self._pattern.sub(lambda found: self._stand_ins[found[0]], piece.text)
            if piece.by_template
            else piece.text
            for piece in pieces
        )
        ids: list[int] = reader(
            whole, add_special_tokens=False, split_special_tokens=True
        ).input_ids
        return [self._original.get(i, i) for i in ids]

    def _reader(self) -> PreTrainedTokenizerBase:
        """Return the copy of the tokenizer that knows the stand-ins."""
        if self._copy is None:
            tokenizer, secret = self._tokenizer(), secrets.token_hex(8)
            assert tokenizer is not None  # the caller holds it
            reader: Any = copy.deepcopy(tokenizer)  # transformers' types do not fit tokenizers'
            for number, (content, token) in enumerate(self._tokens.items()):
                self._stand_ins[content] = f"\ue000{secret}.{number}\ue001"
                alike = {"lstrip": token.lstrip, "rstrip": token.rstrip}
                reader.add_tokens(
                    AddedToken(self._stand_ins[content], normalized=False, special=False, **alike)
                )
                new = reader.convert_tokens_to_ids(self._stand_ins[content])
                self._original[new] = self.ids[content]
            self._copy = reader
            return reader
        return self._copy


_special_tokens: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, SpecialTokens]" = (
    weakref.WeakKeyDictionary()
)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Return the special tokens of a tokenizer, computed once."""
    if tokenizer not in _special_tokens:
        _special_tokens[tokenizer] = SpecialTokens(tokenizer)
    return _special_tokens[tokenizer]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, system_prompt: str | None = None
) -> list[int]:
    """Return the ids of the prompt up to where the response begins, by the chat template if there
    is one. A system turn of the prompt's own replaces `system_prompt`."""
    if tokenizer.chat_template is None:
        return _without_template(tokenizer, prompt, system_prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    try:
        rendered = render_messages(tokenizer, messages, generation=True)
    except BadRow as problem:
        raise UserError(str(problem)) from None
    last = messages[-1]["content"]
    if _letters(last) not in _letters(rendered.text):
        raise UserError(
            f"The model's chat template drops the last turn ({last[:60]!r}), so the model would "
            f"not see it; repair the template in the model's directory or use another model."
        )
    return rendered.ids(tokenizer)


def render_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], generation: bool
) -> Rendered:
    """Render messages by the chat template, in pieces where some text spells a special token."""
    if tokenizer.chat_template is None:
        raise BadRow(
            "it holds messages, but the model has no chat template; give a prompt and a response."
        )
    special = special_tokens(tokenizer)
    text = apply_template(tokenizer, messages, generation)
    spelling = [m for m in messages if any(special.spelt_in(t) for t in _texts(m))]
    if not spelling:
        return template_text(text)
    for message in spelling:
        for key, value in _other_fields(message):
            if any(special.spelt_in(t) for t in _texts([key, value])):
                raise BadRow(
                    f"the {key} of a message spells a special token of the model; only its "
                    f"content may."
                )
    secret = secrets.token_hex(8)
    stand_ins = {f"\ue000{secret}.{i}\ue001": m["content"] for i, m in enumerate(messages)}
    replaced = [{**m, "content": mark} for m, mark in zip(messages, stand_ins, strict=True)]
    return _align(text, apply_template(tokenizer, replaced, generation), stand_ins)


def _align(text: str, outline: str, stand_ins: Mapping[str, str]) -> Rendered:
    """Split `text` into pieces, by the same template's rendering of stand-ins for the contents.

    Templates may trim a content; one that changes more of it is refused.
    """
    parts = re.split("(" + "|".join(map(re.escape, stand_ins)) + ")", outline)
    pieces, at = [Piece(parts[0], by_template=True)], len(parts[0])
    whole = text.startswith(parts[0])
    for stand_in, mark in zip(parts[1::2], parts[2::2], strict=True):
        content = stand_ins[stand_in]
        ways = (content, content.strip(), content.lstrip(), content.rstrip())
        fitting = [way for way in ways if text.startswith(way + mark, at)]
        if not fitting:
            whole = False
            break
        pieces += [Piece(fitting[0], by_template=False), Piece(mark, by_template=True)]
        at += len(fitting[0]) + len(mark)
    if not whole or at != len(text):
        raise BadRow(
            "its text spells a special token of the model, and the chat template changes the text "
            "of a message, so that the two cannot be told apart; take the token out of the text."
        )
    return Rendered(tuple(piece for piece in pieces if piece.text))


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], generation: bool
) -> str:
    """Return the template's text of the messages; raise `BadRow` where it does not render."""
    try:
        return render_chat(tokenizer, messages, add_generation_prompt=generation)
    except TemplateFailed as error:
        raise BadRow(f"the model's chat template does not render: {error}.") from None


def _without_template(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, system_prompt: str | None
) -> list[int]:
    """Return the prompt's ids, with what the tokenizer writes before every text."""
    if system_prompt is not None:
        raise UserError("data.system_prompt needs a model with a chat template; leave it out.")
    if not isinstance(prompt, str):
        raise UserError(
            "the prompt is a list of messages, but the model has no chat template; write it as "
            "text, or use a model that has one."
        )
    return encode_with_bos(tokenizer, prompt)


def encode_with_bos(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of plain text, with what the tokenizer writes before every text."""
    if not special_tokens(tokenizer).spelt_in(text):
        return tokenizer(text).input_ids
    return tokenizer(text, split_special_tokens=True).input_ids


def _other_fields(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in message.items() if key != "content"]


def _texts(value: Any) -> Iterator[str]:
    """Yield every text inside a message, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _letters(text: str) -> str:
    """Return text without white space, which templates trim."""
    return "".join(text.split())
