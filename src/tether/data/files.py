"""Read files of rows: JSON lines, CSV, parquet and arrow.

A row keeps its place in the file, so that an error can name file and line.
"""

import codecs
import csv
import io
import json
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tether import assets
from tether.errors import UserError, one_line

Found = Iterator[tuple[int, "dict[str, Any] | BadRow"]]  # position from 0, and the row

MAX_NESTING = 50  # levels of a row; far below what Python's own JSON can write again
NESTED = "it is nested too deeply; write one flat object per line."


class BadRow(Exception):
    """What is wrong with one row, and what to write instead."""


class FileRow(NamedTuple):  # there may be millions: it is made in a third of a dataclass's time
    """One row of a file, or why there is none."""

    path: str
    unit: str  # what its position counts: lines, or in parquet rows
    position: int  # from 0
    columns: dict[str, Any]
    problem: BadRow | None = None

    @property
    def place(self) -> str:
        """File and line, as a message names them."""
        return f"{self.path}, {self.unit} {self.position + 1}"


def read_file(path: str) -> Iterator[FileRow]:
    """Yield every row, whole or broken, in file order. The suffix decides the format: `.csv`,
    `.parquet`, `.arrow`, and JSON lines for any other."""
    unit = unit_of(path)
    match Path(path).suffix.lower():
        case ".csv":
            found = _read_csv(path)
        case ".parquet":
            found = _read_parquet(path)
        case ".arrow":
            found = ArrowFile(path).rows()
        case _:
            found = _read_json_lines(path)
    for position, columns in found:
        if isinstance(columns, dict) and nested_deeper_than(columns, MAX_NESTING):
            columns = BadRow(NESTED)
        if isinstance(columns, BadRow):
            yield FileRow(path, unit, position, {}, columns)
        else:
            yield FileRow(path, unit, position, columns)


def unit_of(path: str) -> str:
    """Return what the positions of a file's rows count."""
    return "row" if Path(path).suffix.lower() in (".parquet", ".arrow") else "line"


def read_rows(path: str) -> list[dict[str, Any]]:
    """Return the columns of every row; the first broken row is refused."""
    rows = []
    for row in read_file(path):
        if row.problem is not None:
            raise UserError(f"{row.place}: {row.problem}")
        rows.append(row.columns)
    return rows


def nested_deeper_than(value: Any, levels: int) -> bool:
    """Return whether objects or lists are nested in it more than `levels` deep."""
    if not isinstance(value, dict | list):
        return False
    if levels == 0:
        return True
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)) and nested_deeper_than(item, levels - 1):
            return True
    return False


def _open(path: str) -> BinaryIO:
    try:
        return assets.resolve(path).open("rb")
    except OSError as error:
        reason = one_line(error).lower()
        raise UserError(
            f"{path} cannot be opened: {reason}{assets.looked_at(path)}; check data.train and "
            f"data.heldout."
        ) from None


def _read_json_lines(path: str) -> Found:
    with _open(path) as file:
        # Only a line feed ends a line: JSON text may hold other separators, such as U+2028.
        for position, line in enumerate(file):
            if position == 0:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                yield position, _parse_json(line.removesuffix(b"\n"))
            except BadRow as problem:
                yield position, problem


def _parse_json(line: bytes) -> dict[str, Any]:
    if not line.strip():
        raise BadRow("it is empty; write one JSON object per line.")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadRow("it is not UTF-8; save the file as UTF-8 JSON lines.") from None
    except RecursionError:
        raise BadRow(NESTED) from None
    except ValueError as error:
        raise BadRow(f"it is not JSON ({error}); write one object per line.") from None
    if not isinstance(row, dict):
        raise BadRow(f"it holds {type(row).__name__}, not an object with columns.")
    return row


def _read_csv(path: str) -> Found:
    """Yield rows by the names in the first line. Bytes that are not UTF-8 are kept as lone
    surrogates, so that only the row that holds them is broken."""
    with _open(path) as file:
        text = file.read().decode("utf-8-sig", errors="surrogateescape")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = _csv_header(next(reader, None))
    except (BadRow, csv.Error) as problem:
        raise UserError(
            f"{path}, line 1: {problem}; write the names of the columns there."
        ) from None
    while True:
        position = reader.line_num  # where the row begins: a quoted cell may span lines
        try:
            cells = next(reader, None)
            if cells is None:
                return
            yield position, _csv_row(header, cells)
        except BadRow as problem:
            yield position, problem
        except csv.Error as problem:
            yield position, BadRow(f"it is not CSV ({problem}); quote a cell that holds quotes.")


def _csv_header(cells: list[str] | None) -> list[str]:
    if cells is None:
        return []
    if not all(name.strip() for name in cells) or not cells:
        raise BadRow("a column has no name")
    twice = [name for name in cells if cells.count(name) > 1]
    if twice:
        raise BadRow(f"two columns are called {twice[0]!r}")
    return cells


def _csv_row(header: list[str], cells: list[str]) -> dict[str, Any]:
    if not cells:
        raise BadRow("it is empty; write one row per line.")
    if len(cells) != len(header):
        raise BadRow(
            f"it has {len(cells)} cells, but the first line names {len(header)} columns; quote a "
            f"cell that holds a comma."
        )
    if any("\udc80" <= char <= "\udcff" for cell in cells if not cell.isascii() for char in cell):
        raise BadRow("it is not UTF-8; save the file as UTF-8 CSV.")
    return dict(zip(header, cells, strict=True))


def _read_parquet(path: str) -> Found:
    """Yield rows without the columns that hold bytes, such as images: a reward gets text and
    numbers."""
    import pyarrow as pa  # only these files need it, and it takes a while to import
    import pyarrow.parquet as pq

    with _open(path) as file:
        try:
            parquet = pq.ParquetFile(file)
            names = _names(parquet.schema_arrow, path)
            position = 0
            for batch in parquet.iter_batches(batch_size=1024, use_threads=False):
                for columns in _plain_rows(batch.select(names)):
                    yield position, columns
                    position += 1
        except (pa.ArrowException, OSError, NotImplementedError) as error:
            reason = one_line(error).rstrip(".")
            raise UserError(
                f"{path} cannot be read as parquet ({reason}); it may be cut off: write or copy it "
                f"again."
            ) from None


class ArrowFile:
    """The rows of an arrow file, by number. Its pages are read when a row of them is."""

    def __init__(self, path: str) -> None:
        import pyarrow as pa  # only these files need it, and it takes a while to import

        self.path = path
        try:
            mapped = pa.memory_map(str(assets.resolve(path)))
            batches = _batches(pa, mapped)
            self.metadata = dict(batches[0].schema.metadata or {}) if batches else {}
            names = _names(batches[0].schema, path) if batches else []
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{path} cannot be read as arrow ({one_line(error).rstrip('.')}); it may be cut "
                f"off: write or copy it again."
            ) from None
        self.batches = [batch.select(names) for batch in batches]
        self.starts = [0, *accumulate(batch.num_rows for batch in self.batches)]

    def __len__(self) -> int:
        return self.starts[-1]

    def row(self, number: int) -> dict[str, Any] | BadRow:
        """Return a row by its number."""
        batch = bisect_right(self.starts, number) - 1
        [found] = _plain_rows(self.batches[batch].slice(number - self.starts[batch], 1))
        return found

    def rows(self) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
        """Yield every row with its number."""
        for start, batch in zip(self.starts, self.batches, strict=False):
            yield from enumerate(_plain_rows(batch), start)


def _batches(pa: Any, mapped: Any) -> list[Any]:
    """Return the batches of the file format, or of the stream that `datasets` writes."""
    try:
        reader = pa.ipc.open_file(mapped)
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except pa.ArrowInvalid:
        mapped.seek(0)
        return list(pa.ipc.open_stream(mapped))


def _names(schema: Any, path: str) -> list[str]:
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise UserError(f"{path}: two columns are called {twice[0]!r}; rename one.")
    return [column.name for column in schema if not _holds_bytes(column.type)]


def _holds_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))


def _plain_rows(batch: Any) -> Iterator[dict[str, Any] | BadRow]:
    try:
        yield from map(_plain, batch.to_pylist())
    except (UnicodeDecodeError, OverflowError):  # of a single row: find out which
        for number in range(batch.num_rows):
            try:
                [row] = batch.slice(number, 1).to_pylist()
                yield _plain(row)
            except UnicodeDecodeError:
                yield BadRow("a text in it is not UTF-8; write the file again from UTF-8 text.")
            except OverflowError:
                yield BadRow("a time in it is beyond the year 9999; write it as text.")


def _plain(value: Any) -> Any:
    """Return a value as JSON can write it; times, decimals and the like become text."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case dict():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
    return str(value)
