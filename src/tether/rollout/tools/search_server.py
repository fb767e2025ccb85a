"""Serve a corpus over HTTP in Search-R1's protocol: `tether serve-retriever`.

    POST /retrieve {"queries": ["…", …], "topk": 3, "return_scores": true}
      -> {"result": [[{"document": {…}, "score": 1.5}, …], …]}     with return_scores
      -> {"result": [[{…}, …], …]}                                 without: the documents alone

A document is its whole line of the corpus. A request that a web page made a browser send is
refused, by its Origin or by a Host that is not this server's.
"""

import json
import socket
from collections.abc import Collection
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tether.rollout.tools.search import Retriever

MAX_BYTES = 4 << 20  # of a request
MAX_QUERIES = 4096
MAX_QUERY = 10_000  # characters
MAX_TOPK = 100
MAX_ANSWER = 16 << 20  # bytes; a small request for many long documents would make it any size


def make_app(
    retriever: Retriever, topk: int = 3, hosts: Collection[str] | None = None
) -> Starlette:
    """Return the application. `topk` is the default of a request; a Host header must be one of
    `hosts`."""

    async def retrieve(request: Request) -> Response:
        _refuse_browsers(request, hosts)
        asked = parse_request(await _read_body(request), topk)
        return Response(
            await run_in_threadpool(_answer, retriever, asked), media_type="application/json"
        )

    return Starlette(
        routes=[Route("/retrieve", retrieve, methods=["POST"])],
        exception_handlers={HTTPException: _as_json},
    )


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve until interrupted."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", ws="none", server_header=False
    )
    uvicorn.Server(config).run(sockets=[listener])


def parse_request(body: bytes, topk: int) -> dict[str, Any]:
    """Return the request's fields, or raise with one sentence about what is wrong with it."""
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


def _refuse_browsers(request: Request, hosts: Collection[str] | None) -> None:
    given = request.headers.getlist("host")
    foreign = hosts is not None and (len(given) != 1 or given[0].lower() not in hosts)
    if foreign or "origin" in request.headers:
        raise HTTPException(403, "This server answers programs, under its own address only.")


def _answer(retriever: Retriever, asked: dict[str, Any]) -> bytes:
    """Return the body, made query by query, so that it never exceeds `MAX_ANSWER`."""
    results, size = [], 0
    for query in asked["queries"]:
        found = retriever.search(query, asked["topk"])
        if asked["return_scores"]:
            result = [{"document": document, "score": score} for document, score in found]
        else:
            result = [document for document, _ in found]
        said = json.dumps(result, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        results.append(said.encode())
        size += len(results[-1])
        if size > MAX_ANSWER:
            raise HTTPException(
                413, f"The answer would have more than {MAX_ANSWER} bytes; send fewer queries."
            )
    return b'{"result":[' + b",".join(results) + b"]}"


def _wrong(sentence: str) -> HTTPException:
    return HTTPException(422, sentence)


async def _as_json(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # the only kind that it is registered for
    sentences = {
        404: "There is only /retrieve here.",
        405: "/retrieve answers POST only.",
    }
    said = sentences.get(error.status_code, error.detail)
    return JSONResponse({"detail": said}, error.status_code, headers=error.headers)
