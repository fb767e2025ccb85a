"""A corpus: JSON lines of {"id": …, "contents": "title\\ntext"}, as Search-R1 has them."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from tether import assets
from tether.data.files import BadRow, read_file
from tether.errors import UserError


@dataclass(frozen=True)
class Corpus:
    path: str
    documents: list[dict[str, Any]]  # as they stand in the file: an answer hands them out whole
    broken: list[str] = field(default_factory=list)  # lines that were left out, and why

    def __len__(self) -> int:
        return len(self.documents)


@runtime_checkable
class Retriever(Protocol):
    """Whatever finds documents for a query."""

    def search(self, query: str, topk: int) -> list[tuple[dict[str, Any], float]]:
        """Documents with their scores, best first."""
        ...


def read_corpus(path: str, on_bad_row: Literal["refuse", "skip"] = "refuse") -> Corpus:
    """Every document, checked. A broken line is refused by its number, or left out and named."""
    if not assets.resolve(path).is_file():
        raise UserError(f"The corpus {path} is not a file.")
    documents, broken = [], []
    for row in read_file(path):
        try:
            if row.problem is not None:
                raise row.problem
            documents.append(_checked(row.columns))
        except BadRow as problem:
            where = f"{row.place}: {problem}"
            if on_bad_row == "refuse":
                raise UserError(where) from None
            broken.append(where)
    if not documents:
        first = (
            f" that can be used; {broken[0]}" if broken else '; write {"id", "contents"} a line.'
        )
        raise UserError(f"{path} has no documents{first}")
    return Corpus(path, documents, broken)


def _checked(columns: dict[str, Any]) -> dict[str, Any]:
    if "contents" not in columns:
        raise BadRow('there is no "contents"; write {"id": …, "contents": "title\\ntext"}.')
    contents = columns["contents"]
    if not isinstance(contents, str) or not contents.strip():
        kind = "empty" if isinstance(contents, str) else type(contents).__name__
        raise BadRow(f'"contents" is {kind}; write the title and the text of a document.')
    try:
        json.dumps(columns, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:  # of which half a surrogate pair is one
        raise BadRow(
            "it holds NaN, infinity or half a surrogate pair, which cannot be sent as JSON."
        ) from None
    return columns
