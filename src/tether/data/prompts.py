"""Read, check and tokenise prompt files before training, then pick prompts by iteration."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from math import ceil
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from tether.algo.random import permutation, permuted
from tether.config import DataFile, DataSection
from tether.data.chat_templates import TemplateTooCostly, render_chats
from tether.data.files import ArrowFile, BadRow, FileRow, read_file
from tether.data.generated import generated_rows
from tether.data.messages import (
    Prompt,
    column_names,
    parse_prompt,
    prompt_text,
    render_prompt,
    require_columns,
    reward_columns,
    without_chat_template,
)
from tether.data.prompt_cache import cached_prompts, longest_prompt
from tether.data.stored import Encoded, StoredPrompts
from tether.errors import UserError
from tether.types import Prompts


def as_fraction(weight: float) -> Fraction:
    """Return the weight as it was written: 0.1 is a tenth, not the binary fraction next to it."""
    return Fraction(str(weight))


def file_at(position: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Return the file whose turn it is at `position` of the stream, and its number of turns before.

    Of the first n prompts the first file has the ceiling of n times its share, and the others
    divide the rest among themselves in the same way. So there is no state, and the counts are exact
    where n times every share is an integer.
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
    """Return the first `count` rows without repetition, as (file, row in it), by weight for as long
    as every file has rows left."""
    due = [
        (row / weight, file, row)
        for file, (size, weight) in enumerate(zip(sizes, weights, strict=True))
        for row in range(min(size, count))
    ]
    return [(file, row) for _, file, row in sorted(due)[:count]]


NUM_PROBED = 32  # prompts of a batch on which the fast way is compared with the slow one


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], system_prompt: str | None
) -> "list[list[int] | UserError]":
    """Return for each prompt its ids, or what is wrong with it."""
    found: dict[int, list[int]] = {}
    plain = _plain(tokenizer, prompts)
    texts = _texts(tokenizer, list(plain.values()), system_prompt)
    if texts is not None:
        # `render_prompt` complains about a prompt that the template left out.
        whole = [(i, t) for (i, p), t in zip(plain.items(), texts, strict=True) if p in t]
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


def _plain(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> dict[int, str]:
    """Return the prompts that are text and spell no added token, by number."""
    if not tokenizer.is_fast:
        return {}
    added = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values()]
    spelt = re.compile("|".join(added) or r"(?!)").search
    return {i: p for i, p in enumerate(prompts) if isinstance(p, str) and spelt(p) is None}


def _texts(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str], system_prompt: str | None
) -> list[str] | None:
    """Return each prompt as the model will read it, or None where one cannot be rendered so."""
    if tokenizer.chat_template is None:
        return prompts if system_prompt is None else None
    before: list[dict[str, Any]] = []
    if system_prompt is not None:
        before.append({"role": "system", "content": system_prompt})
    conversations = [[*before, {"role": "user", "content": prompt}] for prompt in prompts]
    return render_chats(tokenizer, conversations)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return ids. A template writes its own special tokens; without one the tokenizer adds them."""
    add = tokenizer.chat_template is None
    tokenizer("", add_special_tokens=add)  # switches padding and truncation of the backend off
    backend = cast(Tokenizer, tokenizer.backend_tokenizer)
    encoded = backend.encode_batch_fast(texts, add_special_tokens=add)
    return [one.ids for one in encoded]


ENVIRONMENT = "environment"  # the source whose prompts `reset` says
ROWS_PER_BATCH = 8192  # rows that are encoded together
OnProgress = Callable[[str, int], None]  # a file, and how many of its rows have been read


@dataclass(frozen=True)
class PromptSet:
    """All prompts of one file, or of several that are mixed, in file order."""

    prompts: Prompts  # those in memory
    sizes: list[int]  # number of prompts per file
    weights: list[float]  # per file
    broken: list[str] = field(default_factory=list)  # rows that were left out, and why
    unread_tokens: int = 0  # the most that prompts may have which were not read
    stored: Mapping[int, StoredPrompts] = field(default_factory=dict)  # by file: those in no memory

    def __len__(self) -> int:
        return sum(self.sizes)

    def newly_broken(self) -> list[str]:
        """Return the rows that were drawn, were broken and left out since this was last asked."""
        return [problem for file in self.stored.values() for problem in file.newly_broken()]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, as far as they are known before the run."""
        return max(max(map(len, self.prompts.ids), default=0), self.unread_tokens)

    def without(self, others: "PromptSet") -> "PromptSet":
        """Return a copy without the generated prompts that `others` has as well."""
        known = {
            text
            for text, file in zip(others.prompts.texts, others.prompts.files, strict=True)
            if text and file.startswith("reasoning_gym:")
        }
        keep = [i for i, text in enumerate(self.prompts.texts) if text not in known]
        if len(keep) == len(self.prompts):
            return self
        dropped = len(self.prompts) - len(keep)
        told = f"{dropped} held-out questions are training questions as well."
        spans = pairwise(self._memory_starts())
        sizes = [
            size if file in self.stored else sum(a <= i < b for i in keep)
            for file, (size, (a, b)) in enumerate(zip(self.sizes, spans, strict=True))
        ]
        if not all(sizes):
            raise UserError(
                "All questions of a held-out source are training questions as well; give it more "
                "rows by `size`, or a family with more questions."
            )
        return replace(
            self, prompts=self.prompts.select(keep), sizes=sizes, broken=[*self.broken, told]
        )

    def first(self, count: int) -> Prompts:
        """Return prompts from the top of the file; of several files, by weight."""
        starts = [0, *accumulate(self.sizes)]
        chosen = first_rows(count, self.sizes, [as_fraction(weight) for weight in self.weights])
        return self._pick(starts[file] + row for file, row in chosen)

    def for_iteration(self, iteration: int, count: int, seed: int, shuffle: bool) -> Prompts:
        """Return the prompts of one iteration, where every iteration takes as many.

        Computed from the iteration alone, so a resumed run has no position to restore.
        """
        return self.window(iteration * count, count, seed, shuffle)

    def window(self, start: int, count: int, seed: int, shuffle: bool) -> Prompts:
        """Return `count` prompts from position `start` of the data passes laid end to end."""
        starts = [0, *accumulate(self.sizes)]
        weights = [as_fraction(weight) for weight in self.weights]

        def row(position: int) -> int:
            file, taken = file_at(position, weights)
            data_pass, place = divmod(taken, self.sizes[file])
            if shuffle and file in self.stored:
                place = _stored_place(place, self.sizes[file], seed, file, data_pass)
            elif shuffle:
                place = int(_order(self.sizes[file], seed, file, data_pass)[place])
            return starts[file] + place

        return self._pick(row(position) for position in range(start, start + count))

    def rows(self, rows: Iterable[int]) -> Prompts:
        """Return prompts by their number in this set."""
        return self._pick(rows)

    def _pick(self, rows: Iterable[int]) -> Prompts:
        rows = list(rows)
        if not self.stored:
            return self.prompts.select(rows)
        starts, in_memory = [0, *accumulate(self.sizes)], self._memory_starts()
        places = [(file := bisect_right(starts, row) - 1, row - starts[file]) for row in rows]
        parts: dict[int, Prompts] = {}
        order: dict[tuple[int, int], int] = {}  # place -> number in its part
        for file in dict.fromkeys(file for file, _ in places):
            own = [place for its_file, place in places if its_file == file]
            order |= {(file, place): number for number, place in enumerate(own)}
            stored = self.stored.get(file)
            parts[file] = (
                self.prompts.select([in_memory[file] + place for place in own])
                if stored is None
                else stored.pick(own)
            )
        return Prompts.concat([parts[file].select([order[file, place]]) for file, place in places])

    def _memory_starts(self) -> list[int]:
        """Return where each file's rows begin among those in memory."""
        sizes = [0 if file in self.stored else size for file, size in enumerate(self.sizes)]
        return [0, *accumulate(sizes)]


@dataclass(frozen=True)
class HeldoutSets:
    """The held-out prompts, by the name of their set."""

    by_name: Mapping[str, PromptSet]

    def __len__(self) -> int:
        return sum(map(len, self.by_name.values()))

    @property
    def broken(self) -> list[str]:
        """Rows that were left out, and why."""
        return [problem for prompts in self.by_name.values() for problem in prompts.broken]

    @property
    def largest(self) -> PromptSet:
        """The set with the most prompts."""
        return max(self.by_name.values(), key=len)

    def without(self, others: PromptSet) -> "HeldoutSets":
        """Return a copy without the generated prompts that `others` has as well."""
        return HeldoutSets({name: some.without(others) for name, some in self.by_name.items()})

    def first(self, count: int) -> dict[str, Prompts]:
        """Return up to `count` prompts from the top of each set."""
        return {name: prompts.first(count) for name, prompts in self.by_name.items()}

    def evaluated(self, count: int) -> int:
        """Count the prompts of `first`."""
        return sum(min(count, len(prompts)) for prompts in self.by_name.values())


@lru_cache(maxsize=8)
def _order(size: int, seed: int, file: int, data_pass: int) -> np.ndarray:
    """Return the order of a file's rows in one data pass; cached, as iterations share passes."""
    purpose = f"shuffle {file}" if file else "shuffle"
    return permutation(size, seed, purpose, data_pass).numpy()


def _stored_place(place: int, size: int, seed: int, file: int, data_pass: int) -> int:
    """Return the row of a place in one data pass of a file that is in no memory: as `_order` has
    it, but computed alone, so another one."""
    return int(permuted(np.array([place]), size, seed, f"shuffle {file}", data_pass)[0])


def load_prompts(
    files: str | Sequence[DataFile],
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    columns: Sequence[str] = (),
    context: int | None = None,
    reading: OnProgress | None = None,
    heldout: bool = False,
) -> PromptSet:
    """Read and check every row. A broken one is refused with its file and line, or left out and
    named.

    Every row must have `columns` besides the prompt. `context` is the number of tokens that the
    model's positions leave for a prompt. `reading` is called with the progress. Of a source that is
    not a file, held-out rows have seeds of their own.
    """
    files = [DataFile(path=files)] if isinstance(files, str) else files
    if not data.chat_template:
        tokenizer = without_chat_template(tokenizer)
    check = _RowCheck(data, tokenizer, columns, context)
    found, sizes, broken = Prompts([], [], [], [], [], []), [], []
    stored: dict[int, StoredPrompts] = {}
    for number, file in enumerate(files):
        if not file.is_generated and (file.is_mapped or data.cache is not None):
            stored[number] = _stored(file, data, check, reading)
            sizes.append(len(stored[number]))
            continue
        before, problems, read = len(found), [], 0
        rows = (
            generated_rows(file, data.prompt_column, heldout)
            if file.is_generated
            else read_file(file.path)
        )
        while batch := list(islice(rows, ROWS_PER_BATCH)):
            for place, problem in check.add(found, batch, file.path):
                where = f"{place}: {problem}"
                if data.on_bad_row == "refuse":
                    raise UserError(where)
                problems.append(where)
            read += len(batch)
            if reading is not None:
                reading(file.path, read)
        if len(found) == before:
            first = f" that can be used; {problems[0]}" if problems else "; write one per line."
            raise UserError(f"{file.path} has no rows{first}")
        sizes.append(len(found) - before)
        broken += problems
    unread = [data.max_prompt_tokens for file in files if file.is_environment]
    unread += [prompts.longest for prompts in stored.values()]
    weights = [file.weight for file in files]
    return PromptSet(found, sizes, weights, broken, max(unread, default=0), stored)


def _stored(
    file: DataFile, data: DataSection, check: "_RowCheck", reading: OnProgress | None
) -> StoredPrompts:
    """Open an arrow file, or the cache of another one."""
    if file.is_mapped:
        rows, longest = ArrowFile(file.path), data.max_prompt_tokens
    else:
        rows = cached_prompts(file.path, data, check.tokenizer, check.encode, reading)
        longest = min(longest_prompt(rows), data.max_prompt_tokens)
    if len(rows) == 0:
        raise UserError(f"{file.path} has no rows; write at least one.")
    return StoredPrompts(file.path, rows, check, data.on_bad_row, longest, not file.is_mapped)


def load_heldout(
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    columns: Sequence[str] = (),
    context: int | None = None,
    reading: OnProgress | None = None,
) -> HeldoutSets | None:
    """Read and check the held-out prompts as `load_prompts` does; None where there are none."""
    found = {
        name: load_prompts(files, data, tokenizer, columns, context, reading, heldout=True)
        for name, files in data.heldout_sets.items()
    }
    return HeldoutSets(found) if found else None


@dataclass(frozen=True)
class _RowCheck:
    """What every row must fulfil."""

    data: DataSection
    tokenizer: PreTrainedTokenizerBase
    required: Sequence[str]  # columns
    context: int | None

    def encode(self, batch: list[FileRow], path: str) -> list[Encoded]:
        """Return the ids of each row's prompt; None where it has none that could be read."""
        return self._encode([_parse(row, path, self.data) for row in batch])

    def _encode(self, parsed: Sequence[Prompt | BadRow]) -> list[Encoded]:
        prompts = [prompt for prompt in parsed if not isinstance(prompt, BadRow)]
        encoded = iter(encode_prompts(self.tokenizer, prompts, self.data.system_prompt))
        return [None if isinstance(prompt, BadRow) else next(encoded) for prompt in parsed]

    def add(
        self,
        found: Prompts,
        batch: list[FileRow],
        path: str,
        encoded: Sequence[Encoded] | None = None,
    ) -> Iterator[tuple[str, Exception]]:
        """Add the good rows of a batch; yield place and problem of each broken one."""
        data = self.data
        if path == ENVIRONMENT:
            _add_unread(found, batch)
            return
        parsed = [_parse(row, path, data) for row in batch]
        encoded = self._encode(parsed) if encoded is None else encoded
        for row, prompt, ids in zip(batch, parsed, encoded, strict=True):
            try:
                if isinstance(prompt, BadRow):
                    raise prompt
                if isinstance(ids, UserError):  # a template may refuse a single row
                    raise ids
                assert ids is not None  # of a prompt that could be read
                _check_length(len(ids), data.max_prompt_tokens, self.context)
                columns = reward_columns(row.columns, data.prompt_column, data.columns)
                require_columns(self.required, columns)
            except (BadRow, UserError) as problem:
                yield row.place, problem
                continue
            found.texts.append(prompt_text(prompt))
            found.ids.append(ids)
            found.columns.append(columns)
            found.positions.append(row.position)
            found.files.append(path)
            found.messages.append(None if isinstance(prompt, str) else prompt)


def _add_unread(found: Prompts, batch: list[FileRow]) -> None:
    """Add rows whose prompt the environment will say when it is reset."""
    for row in batch:
        found.texts.append("")
        found.ids.append([])
        found.columns.append(row.columns)
        found.positions.append(row.position)
        found.files.append(row.path)
        found.messages.append(None)


def _parse(row: FileRow, path: str, data: DataSection) -> Prompt | BadRow:
    """Return the prompt of a row, or what is wrong with it."""
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
