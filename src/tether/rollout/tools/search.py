"""`<search>query</search>`: documents for a query, wherever they come from."""

from tether.config import SearchTool
from tether.rollout.calls import Refused
from tether.rollout.tools.bm25 import Bm25
from tether.rollout.tools.corpus import Retriever, read_corpus
from tether.rollout.tools.http import GRACE_SECONDS, HttpRetriever, key_in
from tether.rollout.tools.tool import Tool

NOTHING = "No document found."


def search_tool(retriever: Retriever, topk: int, timeout_seconds: float) -> Tool:
    def search(query: str) -> str:
        if not query:
            raise Refused("the query is empty")
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
    """The tool, and the lines of its corpus that were left out."""
    limit = settings.timeout_seconds
    if settings.url is not None:
        variable = settings.key_variable
        key = None if variable is None else key_in(variable, "rollout.tools: key_variable")
        server = HttpRetriever(settings.url, limit, settings.retries, settings.max_bytes, key)
        return search_tool(server, settings.topk, limit + GRACE_SECONDS), []
    corpus = read_corpus(settings.corpus, settings.on_bad_row)
    return search_tool(Bm25(corpus), settings.topk, limit), corpus.broken
