"""Conversations to learn from: which tokens are context, and which are trained on.

A row is a list of `messages`, or a prompt and a response, which may be an episode with tools. All
become a prompt and a response, with a mask of the response tokens that the model is to write, the
EOS included:

    <user>1+1=?<assistant> 2<eos> <user>And 2+2?<assistant> 4<eos>
    ─────── prompt ─────── TT T   F F F F F F F F F F F F F  TT T
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from transformers import PreTrainedTokenizerBase

from tether.config.stages import ConversationSection, PreferenceSection
from tether.data.files import BadRow, read_file
from tether.data.messages import (
    Rendered,
    apply_template,
    encode_text,
    encode_with_bos,
    plain_text,
    render_messages,
    render_prompt,
    template_text,
)
from tether.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
Message = Mapping[str, Any]
Encoded = TypeVar("Encoded")


@dataclass(frozen=True)
class Conversation:
    """One conversation of supervised fine-tuning, as ids."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[bool]  # per response token: True = written by an assistant

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def load_conversations(
    path: str, data: ConversationSection, tokenizer: PreTrainedTokenizerBase, context: int | None
) -> list[Conversation]:
    """Return every row of a file, checked; a broken one is refused with its line."""
    if tokenizer.eos_token_id is None:
        raise UserError(
            "The model's tokenizer names no EOS token, so no response could end; set eos_token in "
            "its tokenizer_config.json."
        )

    def encode(row: Mapping[str, Any]) -> Conversation:
        if data.messages_column in row:
            found = encode_messages(
                tokenizer, with_system_prompt(row[data.messages_column], data.system_prompt)
            )
        else:
            prompt, response = text_column(row, data.prompt_column), row.get(data.response_column)
            turns = (
                checked_turns(response, data.response_column)
                if isinstance(response, list)
                else [text_column(row, data.response_column)]
            )
            found = encode_episode(tokenizer, prompt, turns, data.system_prompt)
        check_num_tokens(len(found), data.max_tokens, context)
        return found

    return encode_rows(path, encode)


def encode_rows(path: str, encode: Callable[[Mapping[str, Any]], Encoded]) -> list[Encoded]:
    """Return `encode` of every row; the first broken row is refused with its place."""
    found = []
    for row in read_file(path):
        try:
            if row.problem is not None:
                raise row.problem
            found.append(encode(row.columns))
        except BadRow as problem:
            raise UserError(f"{row.place}: {problem}") from None
    if not found:
        raise UserError(f"{path} has no rows; write one JSON object per line.")
    return found


def encode_prompt_and_response(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    response: str,
    system_prompt: str | None = None,
) -> Conversation:
    """Encode the two separately, as in sampling, so that no token straddles the border."""
    return encode_episode(tokenizer, prompt, [response], system_prompt)


def encode_episode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    turns: Sequence[str],
    system_prompt: str | None = None,
) -> Conversation:
    """Encode a response whose turns are in turn written by the model and read from a tool.

    Each is encoded apart, as in a rollout. The first and the last are written; what is read is not
    learnt.
    """
    prompt_ids = render_prompt(tokenizer, prompt, system_prompt)
    if not prompt_ids:
        raise BadRow("the prompt has no tokens: the model's tokenizer drops all of its text.")
    response_ids: list[int] = []
    loss_mask: list[bool] = []
    for number, text in enumerate(turns):
        ids = encode_text(tokenizer, text)
        response_ids += ids
        loss_mask += [number % 2 == 0] * len(ids)
    return Conversation(prompt_ids, [*response_ids, _eos_id(tokenizer)], [*loss_mask, True])


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Any) -> Conversation:
    """Encode all turns of a conversation, each assistant turn as if it had been sampled there."""
    check_messages(messages)
    if messages[-1]["role"] != "assistant":
        raise BadRow("the last message is not the assistant's, so there is no response.")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    read = render_messages(tokenizer, messages[: turns[0]], generation=True)
    prompt_ids = read.ids(tokenizer)
    response_ids: list[int] = []
    loss_mask: list[bool] = []
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        content = messages[turn]["content"]
        ids = encode_response(tokenizer, content)
        response_ids += ids
        loss_mask += [True] * len(ids)
        if following is not None:
            until = render_messages(tokenizer, messages[:following], generation=True)
            between = _after(until, read + plain_text(content)).without_leading(
                str(tokenizer.eos_token)
            )
            ids = between.ids(tokenizer)
            response_ids += ids
            loss_mask += [False] * len(ids)
            read = until
    return Conversation(prompt_ids, response_ids, loss_mask)


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a response that the model ends: its text and EOS."""
    return [*encode_text(tokenizer, text), _eos_id(tokenizer)]


def with_system_prompt(messages: Any, system_prompt: str | None) -> Any:
    """Return messages with the system prompt first, unless the row has a system turn of its own.
    Anything that is not a list of messages is returned as it is, and refused later."""
    if system_prompt is None or not isinstance(messages, list) or not messages:
        return messages
    if isinstance(messages[0], Mapping) and messages[0].get("role") == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def check_messages(messages: Any) -> None:
    """Raise `BadRow` for anything but a list of messages with known roles and text."""
    if not isinstance(messages, list) or not messages:
        raise BadRow("its messages must be a list of one or more {role, content} objects.")
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise BadRow(f"a message needs a role, one of {', '.join(ROLES)}.")
        if not is_text(message.get("content")):
            raise BadRow(f"the {message['role']}'s content is not text, or empty.")


def checked_turns(turns: list[Any], name: str) -> list[str]:
    """Return the texts of an episode, or raise `BadRow`."""
    if len(turns) % 2 == 0:
        raise BadRow(
            f"{name!r} lists {len(turns)} texts; write what the model wrote, what it read, what it "
            f"wrote, …, beginning and ending with what it wrote."
        )
    for number, text in enumerate(turns, start=1):
        if not is_text(text):
            raise BadRow(f"text {number} of {name!r} is not text, or empty.")
    return turns


def text_column(row: Mapping[str, Any], name: str) -> str:
    """Return the text of a column, or raise `BadRow`."""
    if name not in row:
        names = ", ".join(row) or "none"
        raise BadRow(f"it has no column {name!r} (it has {names}); set data.*_column.")
    if not is_text(row[name]):
        raise BadRow(f"{name!r} is not text, or empty.")
    return row[name]


def is_text(value: Any) -> bool:
    """Return whether it is text with something to read. Half a surrogate pair cannot be encoded."""
    if not isinstance(value, str) or not value.strip():
        return False
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def check_num_tokens(tokens: int, max_tokens: int, context: int | None) -> None:
    """Raise `BadRow` for more tokens than the config or the model's `context` allows."""
    if tokens > max_tokens:
        raise BadRow(
            f"it has {tokens} tokens, more than data.max_tokens = {max_tokens}; shorten it or "
            f"raise the limit."
        )
    if context is not None and tokens > context:
        raise BadRow(f"it has {tokens} tokens, but the model only {context} positions; shorten it.")


def _after(whole: Rendered, beginning: Rendered) -> Rendered:
    if not whole.text.startswith(beginning.text):
        raise BadRow(
            "the chat template changes earlier turns once others follow, so they cannot all be "
            "learnt at once; give one response per row."
        )
    return whole.after(len(beginning.text))


@dataclass(frozen=True)
class PreferencePair:
    """Two whole dialogues that differ in the response, as ids."""

    chosen: list[int]
    rejected: list[int]


def load_pairs(
    path: str, data: PreferenceSection, tokenizer: PreTrainedTokenizerBase, context: int | None
) -> list[PreferencePair]:
    """Return every row of a file, checked; a broken one is refused with its line.

    `prompt` is text or messages. The responses are text, or the messages that follow the prompt;
    where there is no prompt, they are whole conversations with the prompt inside.
    """

    def encode(row: Mapping[str, Any]) -> PreferencePair:
        sides = []
        for name in (data.chosen_column, data.rejected_column):
            prompt, response = _dialogue(row, data.prompt_column, name)
            ids = encode_whole_dialogue(tokenizer, prompt, response, data.system_prompt)
            check_num_tokens(len(ids), data.max_tokens, context)
            sides.append(ids)
        if sides[0] == sides[1]:
            raise BadRow("chosen and rejected are the same, which teaches nothing; remove the row.")
        return PreferencePair(*sides)

    return encode_rows(path, encode)


def encode_whole_dialogue(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    response: str,
    system_prompt: str | None = None,
    finished: bool = True,
) -> list[int]:
    """Return prompt and response under the chat template; a response that was cut off is not
    ended."""
    if tokenizer.chat_template is None and isinstance(prompt, str):
        if system_prompt is not None:
            raise BadRow("data.system_prompt needs a chat template; leave it out.")
        ids = [*encode_with_bos(tokenizer, prompt), *encode_text(tokenizer, response)]
        return [*ids, _eos_id(tokenizer)] if finished and _has_eos(tokenizer) else ids
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    messages = list(with_system_prompt(messages, system_prompt))
    begun = render_messages(tokenizer, messages, generation=True) + plain_text(response)
    if not finished:
        return begun.ids(tokenizer)
    answer = {"role": "assistant", "content": response}
    whole = apply_template(tokenizer, [*messages, answer], generation=False)
    # A template may write no ending, or change the turn (trim it, say); then the response ends as
    # the policy ended it.
    ending = whole.removeprefix(begun.text) if whole.startswith(begun.text) else ""
    if not ending and _has_eos(tokenizer):
        ending = str(tokenizer.eos_token)
    return (begun + template_text(ending)).ids(tokenizer)


def _dialogue(
    row: Mapping[str, Any], prompt_column: str, name: str
) -> tuple[str | list[Message], str]:
    """Return the prompt and the response of one side."""
    if name not in row:
        raise BadRow(
            f"it has no column {name!r} (it has {', '.join(row) or 'none'}); set data.*_column."
        )
    answer = row[name]
    if isinstance(answer, str):
        if isinstance(row.get(prompt_column), list):
            check_messages(row[prompt_column])
            return row[prompt_column], text_column(row, name)
        return text_column(row, prompt_column), text_column(row, name)
    before = row.get(prompt_column, [])
    before = [{"role": "user", "content": before}] if isinstance(before, str) else before
    check_messages(answer)
    messages = [*before, *answer]
    check_messages(messages)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise BadRow(f"{name!r} does not end with the assistant's answer to a prompt.")
    return messages[:-1], messages[-1]["content"]


def _eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return cast(int, tokenizer.eos_token_id)  # transformers types it as any token attribute


def _has_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.eos_token_id is not None
