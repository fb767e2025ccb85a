"""Prompt files: read, checked and tokenised before training, then taken by iteration."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tether import assets
from tether.algo.random import permutation
from tether.config import DataSection
from tether.data.templates import render_prompt
from tether.errors import UserError
from tether.types import Prompts


@dataclass(frozen=True)
class PromptSet:
    """All prompts of one file, in file order."""

    prompts: Prompts

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


def load_prompts(path: str, data: DataSection, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Every row, checked; a broken one is refused with its file and line."""
    rows = read_rows(path)
    texts, ids = [], []
    for line, row in enumerate(rows, start=1):
        where = f"{path}, line {line}"
        text = _prompt_text(row, data.prompt_column, where)
        tokens = render_prompt(tokenizer, text, data.system_prompt)
        if len(tokens) > data.max_prompt_tokens:
            raise UserError(
                f"{where}: the prompt has {len(tokens)} tokens, more than data.max_prompt_tokens "
                f"= {data.max_prompt_tokens}; shorten it or raise the limit."
            )
        texts.append(text)
        ids.append(tokens)
    columns = [{k: v for k, v in row.items() if k != data.prompt_column} for row in rows]
    return PromptSet(Prompts(texts, ids, columns, positions=list(range(len(rows)))))


def read_rows(path: str) -> list[dict[str, Any]]:
    """A JSON-lines file as one dict a line."""
    try:
        text = assets.resolve(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; save it as UTF-8 JSON lines.") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(
            f"{path} cannot be opened: {reason}; check data.train and data.heldout."
        ) from None
    # Only a line feed ends a line: JSON text may hold other separators, such as U+2028.
    lines = text.removesuffix("\n").split("\n") if text else []
    rows = [
        _parse_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)
    ]
    if not rows:
        raise UserError(f"{path} has no rows; write one JSON object a line.")
    return rows


def _parse_line(line: str, where: str) -> dict[str, Any]:
    if not line.strip():
        raise UserError(f"{where} is empty; write one JSON object a line.")
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); write one object a line.") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} holds {type(row).__name__}, not an object with columns.")
    return row


def _prompt_text(row: dict[str, Any], column: str, where: str) -> str:
    if column not in row:
        raise UserError(
            f"{where} has no column {column!r} (it has {', '.join(row) or 'none'}); "
            f"set data.prompt_column."
        )
    text = row[column]
    if not isinstance(text, str):
        raise UserError(f"{where}: {column!r} is {type(text).__name__}, not text.")
    if not text.strip():
        raise UserError(f"{where}: the prompt is empty.")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(f"{where}: the prompt holds half a surrogate pair, which is no text.")
    return text
