"""Search on a server of Search-R1's protocol, which is trusted with nothing.

    POST URL {"queries": ["…"], "topk": 3, "return_scores": true}
      -> {"result": [[{"document": {"id": …, "contents": "title\\ntext"}, "score": 1.5}, …]]}

An answer must have exactly this shape, and what it holds is only ever read as text.
"""

import json
import math
from typing import Any

from tether.support.http import BadAnswer, JsonClient, bearer

GRACE_SECONDS = 1.0  # that the caller's own limit should leave beside the client's deadline

Documents = list[tuple[dict[str, Any], float]]  # with their scores, best first


class HttpRetriever:
    """Find documents by asking a server."""

    def __init__(
        self,
        url: str,
        timeout_seconds: float = 10.0,
        retries: int = 2,
        max_bytes: int = 1_000_000,
        key: str | None = None,
    ) -> None:
        headers = {} if key is None else bearer(key, "the key of rollout.tools.key_variable")
        self.client = JsonClient(url, timeout_seconds, retries, max_bytes, headers=headers)

    def search(self, query: str, topk: int) -> Documents:
        """Return at most `topk` documents; raise `NoAnswer` or `BadAnswer`."""
        answer = self.client.post({"queries": [query], "topk": topk, "return_scores": True})
        if answer.status != 200:
            raise BadAnswer(f"its status is {answer.status}")
        return parse_answer(answer.content, topk)


def parse_answer(content: bytes, topk: int) -> Documents:
    """Return the documents of an answer to one query. Any other shape raises `BadAnswer`."""
    try:
        answer = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadAnswer("it is not UTF-8") from None
    except (ValueError, RecursionError):
        raise BadAnswer("it is not JSON") from None
    results = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(results, list):
        raise BadAnswer('it has no list "result"')
    if len(results) != 1 or not isinstance(results[0], list):
        raise BadAnswer(f"it holds {len(results)} results, not a list for each of 1 query")
    [found] = results
    if len(found) > topk:
        raise BadAnswer(f"it holds {len(found)} documents, more than topk = {topk}")
    return [_parse_item(item) for item in found]


def _parse_item(item: Any) -> tuple[dict[str, Any], float]:
    document = item.get("document") if isinstance(item, dict) else None
    if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
        raise BadAnswer('a result has no text in "document"."contents"')
    score = item.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise BadAnswer('a result has no finite number as "score"')
    return document, float(score)
