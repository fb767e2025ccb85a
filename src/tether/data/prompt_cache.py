"""`data.cache`: prompts that are tokenised once, into an arrow file that every later run maps.

FOLDER/SHA256.arrow is named by the content of the file that it was made from. It holds each row as
JSON, its place in that file, and its token ids, or what is wrong with it; limits of length are
checked when a row is drawn. Its metadata say which tokenizer and which fields the ids come from:
for others it is refused.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from tether import assets
from tether.config import DataSection
from tether.data.chat_templates import TIME_ATTRIBUTE, TOOLS_ATTRIBUTE, asks_for_date
from tether.data.files import ArrowFile, FileRow, read_file
from tether.data.stored import IDS, KEY, PLACE, PROBLEM, ROW, Encoded
from tether.dist.collectives import on_first_process
from tether.errors import UserError, one_line
from tether.support.user_code import hash_file

SCHEMA = 1  # of the file; one of another layout is written anew under another name
ROWS_PER_BATCH = 8192  # rows that are encoded together


class Encode(Protocol):
    """Encodes rows: each one's ids, or what is wrong with it."""

    def __call__(self, batch: list[FileRow], path: str) -> list[Encoded]: ...


class OnRead(Protocol):
    """Is told how many rows of a file have been read."""

    def __call__(self, path: str, rows: int, /) -> None: ...


def cached_prompts(
    path: str,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    encode: Encode,
    reading: OnRead | None,
) -> ArrowFile:
    """Return the cache of a file, written by the first process if there is none."""
    assert data.cache is not None
    made_by = identity(data, tokenizer)

    def find() -> Path:
        found = hash_file(assets.resolve(path))
        target = Path(data.cache or "") / f"{found[:32]}-{SCHEMA}.arrow"
        if not target.exists():
            _write(target, path, made_by, encode, reading)
        return target

    target = on_first_process(find)
    file = ArrowFile(str(target))
    held = json.loads(file.metadata.get(KEY, b"{}"))
    differ = [name for name, value in made_by.items() if held.get(name) != value]
    if differ:
        raise UserError(
            f"{target}, which holds the tokens of {path}, belongs to another {' and '.join(differ)}"
            f"; remove it, or name another folder as data.cache."
        )
    return file


def longest_prompt(file: ArrowFile) -> int:
    """Return the tokens of a cache's longest prompt."""
    import pyarrow.compute

    pc: Any = pyarrow.compute  # whose functions are made when it is imported
    lengths = [pc.max(pc.list_value_length(batch.column(IDS))).as_py() for batch in file.batches]
    return max((length for length in lengths if length is not None), default=0)


def identity(data: DataSection, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return what the ids of a prompt depend on beside its row, by the name that a user knows."""
    backend: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    content = tokenizer.get_vocab() if backend is None else backend.to_str()
    added = {str(i): str(token) for i, token in tokenizer.added_tokens_decoder.items()}
    template = tokenizer.chat_template
    day = getattr(tokenizer, TIME_ATTRIBUTE, None) if asks_for_date(tokenizer) else None
    tools = getattr(tokenizer, TOOLS_ATTRIBUTE, None)
    return {
        "tokenizer": _digest([content, added, tokenizer.special_tokens_map]),
        "chat template": _digest([template, tools]),
        "data.date": str(day),
        "data.prompt_column": data.prompt_column,
        "data.system_prompt": str(data.system_prompt),
    }


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _write(
    target: Path, path: str, made_by: dict[str, str], encode: Encode, reading: OnRead | None
) -> None:
    """Write a cache, which has its name once it is whole."""
    import pyarrow as pa  # only these files need it, and it takes a while to import

    staged = target.with_suffix(f".{os.getpid()}.tmp")
    columns = [(ROW, pa.large_string()), (PLACE, pa.int64()), (IDS, pa.list_(pa.int32()))]
    told = {KEY: json.dumps(made_by).encode()}
    schema = pa.schema([*columns, (PROBLEM, pa.string())], metadata=told)
    read = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with pa.OSFile(str(staged), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            rows = read_file(path)
            while batch := list(islice(rows, ROWS_PER_BATCH)):
                lines = list(_lines(batch, encode(batch, path)))
                writer.write_batch(pa.RecordBatch.from_pylist(lines, schema))
                read += len(batch)
                if reading is not None:
                    reading(path, read)
        if read == 0:
            raise UserError(f"{path} has no rows; write one per line.")
        os.replace(staged, target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {one_line(error).lower()}; name another folder as "
            f"data.cache."
        ) from None
    finally:
        staged.unlink(missing_ok=True)


def _lines(batch: list[FileRow], encoded: list[Encoded]) -> Iterator[dict[str, Any]]:
    for row, ids in zip(batch, encoded, strict=True):
        if row.problem is not None:
            yield {ROW: None, PLACE: row.position, IDS: None, PROBLEM: str(row.problem)}
        elif isinstance(ids, list):
            text = json.dumps(row.columns)
            yield {ROW: text, PLACE: row.position, IDS: ids, PROBLEM: None}
        else:  # what is wrong with the prompt itself is found again when the row is read
            text, problem = json.dumps(row.columns), None if ids is None else str(ids)
            yield {ROW: text, PLACE: row.position, IDS: None, PROBLEM: problem}
