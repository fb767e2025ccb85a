"""`tether serve-retriever`: a corpus over HTTP, in Search-R1's protocol.

    POST /retrieve {"queries": ["…", …], "topk": 3, "return_scores": true}
      -> {"result": [[{"document": {…}, "score": 1.5}, …], …]}     with return_scores
      -> {"result": [[{…}, …], …]}                                 without: the documents alone

A document is its line of the corpus as it stands there.
"""

import json
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tether.rollout.tools.corpus import Retriever

MAX_BYTES = 4 << 20  # of a request
MAX_QUERIES = 4096
MAX_QUERY = 10_000  # characters
MAX_TOPK = 100


def make_app(retriever: Retriever, topk: int = 3) -> Starlette:
    """`topk` is for requests that do not say."""

    async def retrieve(request: Request) -> JSONResponse:
        asked = read_request(await _read_body(request), topk)
        found = await run_in_threadpool(_search_all, retriever, asked["queries"], asked["topk"])
        if not asked["return_scores"]:
            result = [[document for document, _ in one] for one in found]
        else:
            result = [[{"document": d, "score": score} for d, score in one] for one in found]
        return JSONResponse({"result": result})

    return Starlette(
        routes=[Route("/retrieve", retrieve, methods=["POST"])],
        exception_handlers={HTTPException: _say},
    )


def serve(app: Starlette, listener: socket.socket) -> None:
    """Until interrupted."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", ws="none", server_header=False
    )
    uvicorn.Server(config).run(sockets=[listener])


def read_request(body: bytes, topk: int) -> dict[str, Any]:
    """The request's fields, or one sentence of what is wrong with it."""
    try:
        asked = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        raise _wrong("The body is not JSON in UTF-8.") from None
    if not isinstance(asked, dict):
        raise _wrong('The body must be an object: {"queries": ["…"], "topk": 3}.')
    queries = asked.get("queries")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise _wrong('"queries" must be a list of texts.')
    if len(queries) > MAX_QUERIES:
        raise _wrong(f'"queries" holds {len(queries)}; send at most {MAX_QUERIES} at a time.')
    if any(len(query) > MAX_QUERY for query in queries):
        raise _wrong(f"A query may have {MAX_QUERY} characters.")
    wanted = topk if asked.get("topk") is None else asked["topk"]
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= MAX_TOPK:
        raise _wrong(f'"topk" must be a whole number from 1 to {MAX_TOPK}.')
    with_scores = asked.get("return_scores", False)
    if not isinstance(with_scores, bool):
        raise _wrong('"return_scores" must be true or false.')
    return {"queries": queries, "topk": wanted, "return_scores": with_scores}


async def _read_body(request: Request) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BYTES:
            raise HTTPException(413, f"A request may have {MAX_BYTES} bytes.")
    return bytes(content)


def _search_all(
    retriever: Retriever, queries: list[str], topk: int
) -> list[list[tuple[dict[str, Any], float]]]:
    return [retriever.search(query, topk) for query in queries]


def _wrong(sentence: str) -> HTTPException:
    return HTTPException(422, sentence)


async def _say(request: Request, error: HTTPException) -> JSONResponse:
    sentences = {
        404: "There is only /retrieve here.",
        405: "/retrieve answers POST only.",
    }
    said = sentences.get(error.status_code, error.detail)
    return JSONResponse({"detail": said}, error.status_code, headers=error.headers)
