"""`<search>query</search>`: documents for a query, wherever they come from."""

from typing import Any, Protocol, runtime_checkable

from tether.config import SearchTool
from tether.rollout.calls import Refused
from tether.rollout.tools.bm25 import Bm25
from tether.rollout.tools.corpus import read_corpus
from tether.rollout.tools.tool import Tool

NOTHING = "No document found."


@runtime_checkable
class Retriever(Protocol):
    def search(self, query: str, topk: int) -> list[tuple[dict[str, Any], float]]:
        """Documents with their scores, best first."""
        ...


def search_tool(retriever: Retriever, settings: SearchTool) -> Tool:
    def search(query: str) -> str:
        if not query:
            raise Refused("the query is empty")
        found = retriever.search(query, settings.topk)
        return "\n".join(document["contents"] for document, _ in found) or NOTHING

    return Tool(
        name="search",
        pattern="<search>{}</search>",
        reply="<information>{}</information>",
        call=search,
        timeout_seconds=settings.timeout_seconds,
    )


def build_search(settings: SearchTool) -> tuple[Tool, list[str]]:
    """The tool, and the lines of its corpus that were left out."""
    corpus = read_corpus(settings.corpus, settings.on_bad_row)
    return search_tool(Bm25(corpus), settings), corpus.broken
