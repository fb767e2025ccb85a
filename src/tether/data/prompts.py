"""Prompt files: read, checked and tokenised before training, then taken by iteration."""

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tether import assets
from tether.algo.random import permutation
from tether.config import DataSection
from tether.data.templates import render_prompt
from tether.errors import UserError
from tether.types import Prompts

MAX_NESTING = 50  # levels of a row; far below what Python's own JSON can write again
NESTED = "it is nested too deeply; write one flat object a line."
LONGEST_NAMES = 200  # characters of column names that a sentence quotes


@dataclass(frozen=True)
class PromptSet:
    """All prompts of one file, in file order."""

    prompts: Prompts
    broken: list[str] = field(default_factory=list)  # rows that were left out, and why

    def __len__(self) -> int:
        return len(self.prompts)

    def first(self, count: int) -> Prompts:
        return self._pick(range(min(count, len(self))))

    def take(self, iteration: int, count: int, seed: int, shuffle: bool) -> Prompts:
        """The prompts of one iteration: a window on data passes laid end to end.

        It is computed from the iteration alone, so there is no position to lose.
        """
        stream = np.arange(iteration * count, (iteration + 1) * count)
        rows = stream % len(self)
        if shuffle:
            passes = stream // len(self)
            orders = {int(p): permutation(len(self), seed, "shuffle", int(p)) for p in set(passes)}
            rows = [int(orders[int(p)][row]) for p, row in zip(passes, rows, strict=True)]
        return self._pick(rows)

    def _pick(self, rows: Sequence[int] | np.ndarray) -> Prompts:
        p = self.prompts
        return Prompts(
            texts=[p.texts[i] for i in rows],
            ids=[p.ids[i] for i in rows],
            columns=[p.columns[i] for i in rows],
            positions=[int(i) for i in rows],
        )


def load_prompts(
    path: str,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    columns: Sequence[str] = (),
    context: int | None = None,
) -> PromptSet:
    """Every row, checked. A broken one is refused with its file and line, or left out and named.

    `columns` must be there besides the prompt; `context` is how many tokens a prompt may have for
    the model's sake.
    """
    found, broken = Prompts([], [], [], []), []
    for position, line in enumerate(_read_lines(path)):
        try:
            row = _parse_line(line)
            text = _prompt_text(row, data.prompt_column)
            ids = _tokens(text, data, tokenizer, context)
            _require(columns, row, data.prompt_column)
        except BadRow as problem:
            where = f"{path}, line {position + 1}: {problem}"
            if data.on_bad_row == "refuse":
                raise UserError(where) from None
            broken.append(where)
            continue
        found.texts.append(text)
        found.ids.append(ids)
        found.columns.append({k: v for k, v in row.items() if k != data.prompt_column})
        found.positions.append(position)
    if not found.ids:
        first = f" that can be used; {broken[0]}" if broken else "; write one JSON object a line."
        raise UserError(f"{path} has no rows{first}")
    return PromptSet(found, broken)


def read_rows(path: str) -> list[dict[str, Any]]:
    """A JSON-lines file as one dict a line, whatever its columns are."""
    rows = []
    for number, line in enumerate(_read_lines(path), start=1):
        try:
            rows.append(_parse_line(line))
        except BadRow as problem:
            raise UserError(f"{path}, line {number}: {problem}") from None
    return rows


class BadRow(Exception):
    """What is wrong with one row, and what to write instead."""


def _read_lines(path: str) -> list[bytes]:
    try:
        content = assets.resolve(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(
            f"{path} cannot be opened: {reason}; check data.train and data.heldout."
        ) from None
    # Only a line feed ends a line: JSON text may hold other separators, such as U+2028.
    content = content.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n")
    return content.split(b"\n") if content else []


def _parse_line(line: bytes) -> dict[str, Any]:
    if not line.strip():
        raise BadRow("it is empty; write one JSON object a line.")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadRow("it is not UTF-8; save the file as UTF-8 JSON lines.") from None
    except RecursionError:
        raise BadRow(NESTED) from None
    except ValueError as error:
        raise BadRow(f"it is not JSON ({error}); write one object a line.") from None
    if not isinstance(row, dict):
        raise BadRow(f"it holds {type(row).__name__}, not an object with columns.")
    if _is_nested(row, MAX_NESTING):
        raise BadRow(NESTED)
    return row


def _is_nested(value: Any, levels: int) -> bool:
    """Whether it holds objects or lists inside each other, more than so many levels deep."""
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_nested(item, levels - 1) for item in inside)


def _prompt_text(row: dict[str, Any], column: str) -> str:
    if column not in row:
        raise BadRow(f"it has no column {column!r} (it has {_names(row)}); set data.prompt_column.")
    text = row[column]
    if not isinstance(text, str):
        raise BadRow(f"{column!r} is {type(text).__name__}, not text.")
    if not text.strip():
        raise BadRow("the prompt is empty.")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise BadRow("the prompt holds half a surrogate pair, which is no text.")
    return text


def _tokens(
    text: str, data: DataSection, tokenizer: PreTrainedTokenizerBase, context: int | None
) -> list[int]:
    ids = render_prompt(tokenizer, text, data.system_prompt)
    if len(ids) > data.max_prompt_tokens:
        raise BadRow(
            f"the prompt has {len(ids)} tokens, more than data.max_prompt_tokens = "
            f"{data.max_prompt_tokens}; shorten it or raise the limit."
        )
    if context is not None and len(ids) > context:
        raise BadRow(
            f"the prompt has {len(ids)} tokens, but the model's positions leave room for {context} "
            f"beside rollout.max_response_tokens; shorten it or lower that."
        )
    return ids


def _require(columns: Sequence[str], row: dict[str, Any], prompt_column: str) -> None:
    for name in columns:
        if name not in row or name == prompt_column:
            raise BadRow(
                f"the reward asks for {name!r}, but the row has only the columns {_names(row)}."
            )


def _names(row: dict[str, Any]) -> str:
    """The columns of a row, on one line whatever they are called."""
    names = " ".join(", ".join(row).split()) or "none"
    return names if len(names) <= LONGEST_NAMES else f"{names[:LONGEST_NAMES]} …"
