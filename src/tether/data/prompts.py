"""Prompt files: read, checked and tokenised before training, then taken by iteration."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from tether.algo.random import permutation
from tether.config import DataFile, DataSection
from tether.data.bulk import encode_prompts
from tether.data.files import BadRow, FileRow, read_file
from tether.data.mixing import earliest, exact, turn
from tether.data.shapes import Prompt, names, prompt_of, readable, require, reward_columns
from tether.errors import UserError
from tether.types import Prompts

BATCH = 8192  # rows that are encoded together
Reading = Callable[[str, int], None]  # a file, and how many of its rows have been read


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
        chosen = earliest(count, self.sizes, [exact(weight) for weight in self.weights])
        return self._pick(starts[file] + row for file, row in chosen)

    def take(self, iteration: int, count: int, seed: int, shuffle: bool) -> Prompts:
        """The prompts of one iteration: a window on data passes laid end to end.

        It is computed from the iteration alone, so there is no position to lose.
        """
        starts = [0, *accumulate(self.sizes)]
        weights = [exact(weight) for weight in self.weights]

        def row(position: int) -> int:
            file, taken = turn(position, weights)
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
    reading: Reading | None = None,
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
        while batch := list(islice(rows, BATCH)):
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
            require(wanted, columns)
        except (BadRow, UserError) as problem:
            yield row.place, problem
            continue
        found.texts.append(readable(prompt))
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
            f"{names(row.columns)}); write the columns' names there, or set data.prompt_column."
        )
    try:
        return prompt_of(row.columns, data.prompt_column)
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
