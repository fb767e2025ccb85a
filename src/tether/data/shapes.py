"""The shapes that rows come in: a prompt as text or as messages, verl's nested ground truth, and
columns that the reward knows by another name."""

from collections.abc import Mapping, Sequence
from typing import Any

from tether.data.files import BadRow

# What TRL's trainers give a reward besides prompts, completions and columns.
TRL_EXTRAS = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
LONGEST_NAMES = 200  # characters of column names that a sentence quotes

Message = dict[str, Any]
Prompt = str | list[Message]


def prompt_of(row: Mapping[str, Any], column: str) -> Prompt:
    """The row's prompt: text, or messages as chat models take them."""
    if column not in row:
        raise BadRow(f"it has no column {column!r} (it has {names(row)}); set data.prompt_column.")
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
    if not text.strip():
        raise BadRow(f"{what} is empty.")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise BadRow(f"{what} holds half a surrogate pair, which is no text.")


def readable(prompt: Prompt) -> str:
    """A prompt as a person reads it: the only message's content, or who says what."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def reward_columns(
    row: Mapping[str, Any], prompt_column: str, renamed: Mapping[str, str]
) -> dict[str, Any]:
    """What the reward can ask for besides the prompt. `renamed` gives a column a second name;
    verl keeps the right answer inside `reward_model`, and its rewards ask for `ground_truth`."""
    columns = {name: value for name, value in row.items() if name != prompt_column}
    nested = row.get("reward_model")
    if isinstance(nested, dict) and "ground_truth" in nested:
        columns.setdefault("ground_truth", nested["ground_truth"])
    found = {name: _look_up(columns, path) for name, path in renamed.items()}
    return {**columns, **found} if found else columns


def _look_up(columns: Mapping[str, Any], path: str) -> Any:
    """A column by its name, or what lies inside one: `reward_model.style`."""
    if path in columns:
        return columns[path]
    value: Any = columns
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise BadRow(f"data.columns asks for {path!r}, but it has only {names(columns)}.")
        value = value[name]
    return value


def require(wanted: Sequence[str], columns: Mapping[str, Any]) -> None:
    """An empty cell of a parquet file is null, so null counts as missing."""
    for name in wanted:
        if columns.get(name) is None:
            if name in TRL_EXTRAS and name not in columns:
                raise BadRow(
                    f"the reward asks for {name!r}, which TRL hands over and tether does not; give "
                    f"the parameter a default, or take it by **kwargs."
                )
            state = "it is null there" if name in columns else f"it has only {names(columns)}"
            raise BadRow(
                f"the reward asks for {name!r}, but {state}; add it, or name the column that holds "
                f"it as --data.columns.{name} COLUMN."
            )


def names(row: Mapping[str, Any]) -> str:
    """The columns of a row, on one line whatever they are called."""
    found = " ".join(", ".join(row).split()) or "none"
    return found if len(found) <= LONGEST_NAMES else f"{found[:LONGEST_NAMES]} …"
