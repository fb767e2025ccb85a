"""Pairs of responses to one prompt, the chosen and the rejected, as a reward model reads them.

A reward model reads whole dialogues and is read at the last token, so its rows are plain ids: the
prompt, the response, and whatever the chat template writes to end an assistant's turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.data.conversations import (
    Message,
    check_messages,
    encode_rows,
    refuse_long,
    text_column,
    with_system,
)
from tether.data.files import BadRow
from tether.data.templates import (
    apply_template,
    marks,
    opening_ids,
    plain,
    render_messages,
    text_ids,
)
from tether.stages import PreferenceSection


@dataclass(frozen=True)
class Pair:
    chosen: list[int]
    rejected: list[int]


def load_pairs(
    path: str, data: PreferenceSection, tokenizer: PreTrainedTokenizerBase, context: int | None
) -> list[Pair]:
    """Every row of a file, checked; a broken one is refused with its line.

    `prompt` is text or messages. The responses are text, or the messages that follow the prompt;
    where there is no prompt, they are whole conversations with the prompt inside.
    """

    def encode(row: Mapping[str, Any]) -> Pair:
        sides = []
        for name in (data.chosen_column, data.rejected_column):
            prompt, response = _dialogue(row, data.prompt_column, name)
            ids = dialogue_ids(tokenizer, prompt, response, data.system_prompt)
            refuse_long(len(ids), data.max_tokens, context)
            sides.append(ids)
        if sides[0] == sides[1]:
            raise BadRow("chosen and rejected are the same, which teaches nothing.")
        return Pair(*sides)

    return encode_rows(path, encode)


def dialogue_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    response: str,
    system_prompt: str | None = None,
    finished: bool = True,
) -> list[int]:
    """Prompt and response under the chat template; one that was cut off has no ending."""
    if tokenizer.chat_template is None and isinstance(prompt, str):
        if system_prompt is not None:
            raise BadRow("data.system_prompt needs a chat template; leave it out.")
        ids = [*opening_ids(tokenizer, prompt), *text_ids(tokenizer, response)]
        return [*ids, tokenizer.eos_token_id] if finished and _has_eos(tokenizer) else ids
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    messages = list(with_system(messages, system_prompt))
    begun = render_messages(tokenizer, messages, generation=True) + plain(response)
    if not finished:
        return begun.ids(tokenizer)
    answer = {"role": "assistant", "content": response}
    whole = apply_template(tokenizer, [*messages, answer], generation=False)
    # A template may write no ending, or write the turn otherwise (trimmed, say); then the response
    # ends as the policy ended it.
    ending = whole.removeprefix(begun.text) if whole.startswith(begun.text) else ""
    if not ending and _has_eos(tokenizer):
        ending = tokenizer.eos_token
    return (begun + marks(ending)).ids(tokenizer)


def _dialogue(
    row: Mapping[str, Any], prompt_column: str, name: str
) -> tuple[str | list[Message], str]:
    """The prompt and the response of one side."""
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


def _has_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.eos_token_id is not None
