"""Search on a server of Search-R1's protocol, which is trusted with nothing.

    POST URL {"queries": ["…"], "topk": 3, "return_scores": true}
      -> {"result": [[{"document": {"id": …, "contents": "title\\ntext"}, "score": 1.5}, …]]}

All attempts together have one deadline, from the first connection to the last byte, so a server
that drips costs no more time than one that is down. What it says is read up to a size, must have
this shape to the letter, and is text.
"""

import asyncio
import json
import math
import os
import ssl
import time
from typing import Any

import httpx

from tether.errors import UserError

PAUSE_SECONDS = 0.1  # before the first retry; twice as long before each further one
GRACE_SECONDS = 1.0  # that the caller's own limit should leave beside the deadline here


class NoAnswer(Exception):
    """The server could not be reached or did not finish; another attempt may help."""


class BadAnswer(Exception):
    """The server said what no server of the protocol says; it would say so again."""


def bearer(key: str, what: str) -> dict[str, str]:
    """The header that carries an API key. What is wrong with one is said without showing it."""
    key = key.strip()  # a variable that was read from a file ends in a line feed
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            f"{what} is empty, or holds a blank, a control character or one beyond ASCII, which a "
            f"header cannot carry; set it again."
        )
    return {"Authorization": f"Bearer {key}"}


def key_from_environment(variable: str, field: str) -> str:
    """The value of an environment variable that a field or option names."""
    if not os.environ.get(variable):
        raise UserError(f"{field} names {variable}, which is not set in the environment.")
    return os.environ[variable]


class HttpRetriever:
    def __init__(
        self,
        url: str,
        timeout_seconds: float = 10.0,
        retries: int = 2,
        max_bytes: int = 1_000_000,
        key: str | None = None,
    ) -> None:
        self.url, self.timeout_seconds = url, timeout_seconds
        self.retries, self.max_bytes = retries, max_bytes
        self.key = {} if key is None else bearer(key, "the key of rollout.tools.key_variable")
        # Made once: reading the certificates takes longer than most searches.
        self.verify = ssl.create_default_context() if url.startswith("https:") else False

    def search(self, query: str, topk: int) -> list[tuple[dict[str, Any], float]]:
        return parse_answer(asyncio.run(self._fetch(query, topk)), topk)

    async def _fetch(self, query: str, topk: int) -> bytes:
        """The body of an answer. A coroutine can be stopped wherever it waits: in connecting, in
        the headers, between two bytes."""
        body = {"queries": [query], "topk": topk, "return_scores": True}
        deadline = time.monotonic() + self.timeout_seconds
        failure = NoAnswer("there was no time to ask")
        for attempt in range(self.retries + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                return await asyncio.wait_for(self._post(body), left)
            except (asyncio.TimeoutError, TimeoutError):
                raise NoAnswer(f"it took longer than {self.timeout_seconds:g} s") from None
            except NoAnswer as problem:
                failure = problem
            pause = min(PAUSE_SECONDS * 2**attempt, max(0.0, deadline - time.monotonic()))
            if attempt < self.retries:
                await asyncio.sleep(pause)
        raise failure

    async def _post(self, body: dict[str, Any]) -> bytes:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", **self.key}
        # Neither proxies nor passwords from the environment, and no redirect: only this address.
        client = httpx.AsyncClient(
            trust_env=False, follow_redirects=False, timeout=None, verify=self.verify
        )
        try:
            async with client, client.stream("POST", self.url, json=body, headers=headers) as said:
                _check_head(said, self.max_bytes)
                return await self._read(said)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise NoAnswer(f"{type(error).__name__}: {error}") from None

    async def _read(self, said: httpx.Response) -> bytes:
        content = bytearray()
        async for chunk in said.aiter_raw():  # as sent: nothing is ever unpacked
            content += chunk
            if len(content) > self.max_bytes:
                raise BadAnswer(f"it is larger than max_bytes = {self.max_bytes}")
        return bytes(content)


def _check_head(said: httpx.Response, max_bytes: int) -> None:
    if said.status_code >= 500:
        raise NoAnswer(f"its status is {said.status_code}")
    if said.status_code != 200:
        raise BadAnswer(f"its status is {said.status_code}")
    if said.headers.get("content-encoding", "identity").lower() != "identity":
        raise BadAnswer("it is compressed, though that was not asked for")
    length = said.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise BadAnswer(f"it is larger than max_bytes = {max_bytes}")


def parse_answer(content: bytes, topk: int) -> list[tuple[dict[str, Any], float]]:
    """Documents and scores of an answer to one query; anything odd is refused whole."""
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
    return [_read_item(item) for item in found]


def _read_item(item: Any) -> tuple[dict[str, Any], float]:
    document = item.get("document") if isinstance(item, dict) else None
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(contents, str):
        raise BadAnswer('a result has no text in "document"."contents"')
    score = item.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise BadAnswer('a result has no finite number as "score"')
    return document, float(score)
