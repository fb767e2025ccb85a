"""Prompt files: read, checked and tokenised before training, then taken by iteration."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, islice
from math import ceil
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tether.algo.random import permutation
from tether.config import DataFile, DataSection
from tether.data.chat_templates import TemplateTooCostly, render_chats
from tether.data.files import BadRow, FileRow, read_file
from tether.data.messages import (
    Prompt,
    column_names,
    parse_prompt,
    prompt_text,
    render_prompt,
    require_columns,
    reward_columns,
)
from tether.errors import UserError
from tether.types import Prompts


def as_fraction(weight: float) -> Fraction:
    """The weight as it was written: 0.1 is a tenth, not the binary fraction next to it."""
    return Fraction(str(weight))


def file_at(position: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Whose turn it is at `position` of the stream, and how many turns that file had before.

    Of the first n prompts the first file has the ceiling of n times its share, and the others deal
    the rest among themselves in the same way. So there is nothing to remember, and the counts are
    exact wherever n times every share is whole.
    """
    rest = sum(weights, Fraction(0))
    for file, weight in enumerate(weights):
        share = weight / rest
        before = ceil(position * share)
        if ceil((position + 1) * share) > before:
            return file, before
        position -= before
        rest -= weight
    raise ValueError("no weights")


def first_rows(
    count: int, sizes: Sequence[int], weights: Sequence[Fraction]
) -> list[tuple[int, int]]:
    """The first `count` rows without a repetition, as (file, row in it), by weight for as long as
    every file has rows left."""
    due = [
        (row / weight, file, row)
        for file, (size, weight) in enumerate(zip(sizes, weights, strict=True))
        for row in range(min(size, count))
    ]
    return [(file, row) for _, file, row in sorted(due)[:count]]


NUM_PROBED = (
    32  # prompts of a batch on which both ways are compared before the fast one is believed
)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], system_prompt: str | None
) -> "list[list[int] | UserError]":
    """Return for each prompt its ids, or what is wrong with it."""
    found: dict[int, list[int]] = {}
    plain = _plain(tokenizer, prompts)
    texts = _texts(tokenizer, [str(prompts[i]) for i in plain], system_prompt)
    if texts is not None:
        # What the template left out of the text is for `render_prompt` to complain about.
        whole = [(i, text) for i, text in zip(plain, texts, strict=True) if prompts[i] in text]
        ids = _encode(tokenizer, [text for _, text in whole])
        found = dict(zip((i for i, _ in whole), ids, strict=True))
        probed = list(found)[:NUM_PROBED]
        if any(found[i] != _one(tokenizer, prompts[i], system_prompt) for i in probed):
            found = {}
    return [
        found[i] if i in found else _one(tokenizer, prompt, system_prompt)
        for i, prompt in enumerate(prompts)
    ]


def _one(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, system_prompt: str | None
) -> "list[int] | UserError":
    try:
        return render_prompt(tokenizer, prompt, system_prompt)
    except TemplateTooCostly:
        raise
    except UserError as problem:
        return problem


def _plain(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[int]:
    """Numbers of the prompts that are text and spell no token that was added by hand."""
    if not tokenizer.is_fast:
        return []
    added = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values()]
    spelt = re.compile("|".join(added) or r"(?!)").search
    return [i for i, p in enumerate(prompts) if isinstance(p, str) and spelt(p) is None]


def _texts(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str], system_prompt: str | None
) -> list[str] | None:
    """What the model will read of each, or None where one of them is not to be had this way."""
    if tokenizer.chat_template is None:
        return prompts if system_prompt is None else None
    before: list[dict[str, Any]] = []
    if system_prompt is not None:
        before.append({"role": "system", "content": system_prompt})
    conversations = [[*before, {"role": "user", "content": prompt}] for prompt in prompts]
    return render_chats(tokenizer, conversations)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """A template writes its own special tokens; without one the tokenizer adds them."""
    add = tokenizer.chat_template is None
    # A call by the front door first: it sets padding and truncation aside.
    tokenizer("", add_special_tokens=add)
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=add)
    return [one.ids for one in encoded]


ROWS_PER_BATCH = 8192  # rows that are encoded together
OnProgress = Callable[[str, int], None]  # a file, and how many of its rows have been read


@dataclass(frozen=True)
class PromptSet:
    """All prompts of one file, or of several that are mixed, in file order."""

    prompts: Prompts
    sizes: list[int]  # how many of them each file has
    weights: list[float]  # of each file
    broken: list[str] = field(default_factory=list)  # rows that were left out, and why

    def __len__(self) -> int:
        return len(self.prompts)

    def first(self, count: int) -> Prompts:
        """From the top of the file; of several, by weight."""
        starts = [0, *accumulate(self.sizes)]
        chosen = first_rows(count, self.sizes, [as_fraction(weight) for weight in self.weights])
        return self._pick(starts[file] + row for file, row in chosen)

    def for_iteration(self, iteration: int, count: int, seed: int, shuffle: bool) -> Prompts:
        """The prompts of one iteration: a window on data passes laid end to end.

        It is computed from the iteration alone, so there is no position to lose.
        """
        starts = [0, *accumulate(self.sizes)]
        weights = [as_fraction(weight) for weight in self.weights]

        def row(position: int) -> int:
            file, taken = file_at(position, weights)
            data_pass, place = divmod(taken, self.sizes[file])
            if shuffle:
                place = int(_order(self.sizes[file], seed, file, data_pass)[place])
            return starts[file] + place

        return self._pick(row(p) for p in range(iteration * count, (iteration + 1) * count))

    def _pick(self, rows: Iterable[int]) -> Prompts:
        rows, p = list(rows), self.prompts
        return Prompts(**{name: [getattr(p, name)[i] for i in rows] for name in vars(p)})


@lru_cache(maxsize=8)
def _order(size: int, seed: int, file: int, data_pass: int) -> np.ndarray:
    """The order of a file's rows in one data pass; kept, as iterations ask for the same again."""
    purpose = f"shuffle {file}" if file else "shuffle"
    return permutation(size, seed, purpose, data_pass).numpy()


def load_prompts(
    files: str | Sequence[DataFile],
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    columns: Sequence[str] = (),
    context: int | None = None,
    reading: OnProgress | None = None,
) -> PromptSet:
    """Read and check every row. A broken one is refused with its file and line, or left out and
    named.

    `columns` must be there besides the prompt; `context` is how many tokens a prompt may have for
    the model's sake; `reading` is told every now and then how far it is.
    """
    files = [DataFile(path=files)] if isinstance(files, str) else files
    found, sizes, broken = Prompts([], [], [], [], [], []), [], []
    for file in files:
        before, problems, read = len(found), [], 0
        rows = read_file(file.path)
        while batch := list(islice(rows, ROWS_PER_BATCH)):
            for place, problem in _add(found, batch, file.path, data, tokenizer, columns, context):
                where = f"{place}: {problem}"
                if data.on_bad_row == "refuse":
                    raise UserError(where)
                problems.append(where)
            read += len(batch)
            if reading is not None:
                reading(file.path, read)
        if len(found) == before:
            first = f" that can be used; {problems[0]}" if problems else "; write one a line."
            raise UserError(f"{file.path} has no rows{first}")
        sizes.append(len(found) - before)
        broken += problems
    return PromptSet(found, sizes, [file.weight for file in files], broken)


def _add(
    found: Prompts,
    batch: list[FileRow],
    path: str,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    wanted: Sequence[str],
    context: int | None,
) -> Iterator[tuple[str, Exception]]:
    """Add the good rows of a batch; yield the place of each broken one and what is wrong there."""
    shaped = [_shaped(row, path, data) for row in batch]
    prompts = [prompt for prompt in shaped if not isinstance(prompt, BadRow)]
    encoded = iter(encode_prompts(tokenizer, prompts, data.system_prompt))
    for row, prompt in zip(batch, shaped, strict=True):
        try:
            if isinstance(prompt, BadRow):
                raise prompt
            ids = next(encoded)
            if isinstance(ids, UserError):  # a template may refuse a single row
                raise ids
            _check_length(len(ids), data.max_prompt_tokens, context)
            columns = reward_columns(row.columns, data.prompt_column, data.columns)
            require_columns(wanted, columns)
        except (BadRow, UserError) as problem:
            yield row.place, problem
            continue
        found.texts.append(prompt_text(prompt))
        found.ids.append(ids)
        found.columns.append(columns)
        found.positions.append(row.position)
        found.files.append(path)
        found.messages.append(None if isinstance(prompt, str) else prompt)


def _shaped(row: FileRow, path: str, data: DataSection) -> Prompt | BadRow:
    """The prompt of a row, or what is wrong with it."""
    if row.problem is not None:
        return row.problem
    if data.prompt_column not in row.columns and path.lower().endswith(".csv"):
        return BadRow(
            f"there is no column {data.prompt_column!r} (the first line names "
            f"{column_names(row.columns)}); write the columns' names there, or set "
            f"data.prompt_column."
        )
    try:
        return parse_prompt(row.columns, data.prompt_column)
    except BadRow as problem:
        return problem


def _check_length(tokens: int, limit: int, context: int | None) -> None:
    if tokens == 0:
        raise BadRow("the prompt has no tokens: the model's tokenizer drops all of its text.")
    if tokens > limit:
        raise BadRow(
            f"the prompt has {tokens} tokens, more than data.max_prompt_tokens = {limit}; shorten "
            f"it or raise the limit."
        )
    if context is not None and tokens > context:
        raise BadRow(
            f"the prompt has {tokens} tokens, but the model's positions leave room for {context} "
            f"beside rollout.max_response_tokens; shorten it or lower that."
        )
