"""The search tool: `<search>query</search>` finds documents of a corpus or of a server."""

import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from tether import assets
from tether.config import SearchTool
from tether.data.files import BadRow, read_file
from tether.errors import UserError
from tether.rollout.tool_calls import InvalidArguments
from tether.rollout.tools.search_client import GRACE_SECONDS, Documents, HttpRetriever
from tether.rollout.tools.tool import Tool
from tether.support.http import key_from_environment


@dataclass(frozen=True)
class Corpus:
    """The documents of a file."""

    path: str
    documents: list[dict[str, Any]]  # whole lines of the file, as an answer returns them
    broken: list[str] = field(default_factory=list)  # lines that were left out, and why

    def __len__(self) -> int:
        return len(self.documents)


@runtime_checkable
class Retriever(Protocol):
    """Find documents for a query."""

    def search(self, query: str, topk: int) -> Documents:
        """Return at most `topk` documents with their scores, best first."""
        ...


def read_corpus(path: str, on_bad_row: Literal["refuse", "skip"] = "refuse") -> Corpus:
    """Return every document, checked. A broken line is refused by its number, or left out and
    named."""
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
            f" that can be used; {broken[0]}" if broken else '; write {"id", "contents"} per line.'
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


# Scripts without spaces between words: han, kana, bopomofo.
UNSPACED = (
    r"\u2e80-\u2fdf\u3040-\u30ff\u3105-\u312f\u31a0-\u31bf\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
UNSPACED += r"\U00020000-\U0003ffff"
WORDS = re.compile(rf"([{UNSPACED}]+)|((?:(?![{UNSPACED}])[^\W_])+)")


def terms(text: str) -> list[str]:
    """Return what is looked up: words, ignoring case. In Chinese and Japanese, where nothing marks
    the end of a word, each character and each pair of neighbours."""
    found: list[str] = []
    for run, word in WORDS.findall(unicodedata.normalize("NFKC", text).casefold()):
        if word:
            found.append(word)
        else:
            found += run
            found += map("".join, pairwise(run))
    return found


class Bm25:
    """Find the documents that share the rarest terms with a query, by BM25. Ties go to the earlier
    one, so that the same query always finds the same."""

    def __init__(self, corpus: Corpus) -> None:
        import bm25s  # only search needs it

        self.corpus = corpus
        self.index = bm25s.BM25()
        found = [terms(document["contents"]) for document in corpus.documents]
        if not any(found):
            raise UserError(
                f"No document of {corpus.path} contains a word; there is nothing to find."
            )
        self.index.index(found, show_progress=False)

    def search(self, query: str, topk: int) -> Documents:
        """Return at most `topk` documents, best first, each with at least one term of the query."""
        known = self._known(terms(query))
        if not known:
            return []
        scores = self.index.get_scores(known)
        topk = min(topk, len(scores))
        threshold = max(np.partition(scores, -topk)[-topk], np.finfo(scores.dtype).tiny)
        (candidates,) = np.nonzero(scores >= threshold)
        best = candidates[np.argsort(-scores[candidates], kind="stable")][:topk]
        return [(self.corpus.documents[i], float(scores[i])) for i in best]

    def _known(self, words: Iterable[str]) -> list[str]:
        return [word for word in words if word in self.index.vocab_dict]


NOTHING = "No document found."


def search_tool(retriever: Retriever, topk: int, timeout_seconds: float) -> Tool:
    """Return the tool that searches with a retriever."""

    def search(query: str) -> str:
        if not query:
            raise InvalidArguments("the query is empty")
        found = retriever.search(query, topk)
        return "\n".join(document["contents"] for document, _ in found) or NOTHING

    return Tool(
        name="search",
        pattern="<search>{}</search>",
        reply="<information>{}</information>",
        call=search,
        timeout_seconds=timeout_seconds,
    )


def build_search(settings: SearchTool) -> tuple[Tool, list[str]]:
    """Return the tool, and the lines of its corpus that were left out."""
    limit = settings.timeout_seconds
    if settings.url is not None:
        variable = settings.key_variable
        key = (
            None
            if variable is None
            else key_from_environment(variable, "rollout.tools: key_variable")
        )
        server = HttpRetriever(settings.url, limit, settings.retries, settings.max_bytes, key)
        return search_tool(server, settings.topk, limit + GRACE_SECONDS), []
    if settings.corpus is None:
        raise UserError("rollout.tools: search needs either a corpus or a url.")
    corpus = read_corpus(settings.corpus, settings.on_bad_row)
    return search_tool(Bm25(corpus), settings.topk, limit), corpus.broken
