"""POST JSON to a server that is trusted with nothing. Imports no torch.

One deadline covers all attempts, from the first connection to the last byte, so that a server that
drips costs no more time than one that is down. An answer is read up to a size and never unpacked.
Neither redirects nor proxies and passwords of the environment are followed: only this address.
"""

import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from tether.errors import UserError, one_line

if TYPE_CHECKING:
    import ssl

    import httpx


class NoAnswer(Exception):
    """The server could not be reached, was busy or did not finish; another attempt may help, if not
    before `after_seconds`."""

    def __init__(self, why: str, after_seconds: float = 0.0) -> None:
        super().__init__(why)
        self.after_seconds = after_seconds


class BadAnswer(Exception):
    """The server sent what cannot be used; it would send the same again."""


@dataclass(frozen=True)
class Answer:
    """An answer as it was sent. A status of 429, or of 500 and above, is a `NoAnswer` instead."""

    status: int
    content: bytes


def refuse_userinfo(field: str, url: str, instead: str) -> None:
    """Raise ValueError for an address with a user or password, which would be written into the
    run's files and shown."""
    authority = url.partition("://")[2] or url
    if "@" in re.split(r"[/?#\\]", authority, maxsplit=1)[0]:
        raise ValueError(
            f"{field} holds a user or password before the @, which would be written into the "
            f"run's files; leave it out, and {instead}"
        )


def bearer(key: str, name: str) -> dict[str, str]:
    """Return the header that carries an API key. An error does not show the key."""
    key = key.strip()  # a variable that was read from a file ends in a line feed
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            f"{name} is empty, or holds a blank, a control character or one beyond ASCII, which a "
            f"header cannot carry; set it again."
        )
    return {"Authorization": f"Bearer {key}"}


def key_from_environment(variable: str, field: str) -> str:
    """Return the environment variable that a field or option names."""
    if not os.environ.get(variable):
        raise UserError(f"{field} names {variable}, which is not set in the environment.")
    return os.environ[variable]


@dataclass(frozen=True)
class JsonClient:
    """POST JSON to one address.

    `post` may be used by several threads at once, but not inside a running event loop; there,
    `post_async` is, over connections that requests share.
    """

    url: str
    timeout_seconds: float  # of all attempts together
    retries: int
    max_bytes: int
    pause_seconds: float = 0.1  # before the first retry; twice as long before each further one
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_userinfo("The address", self.url, "send a key in a header")

    def post(self, body: dict[str, Any]) -> Answer:
        """Return the server's answer. Raise `NoAnswer` or `BadAnswer`, each with the reason."""
        import asyncio

        async def alone() -> Answer:
            async with self.connections() as connections:
                return await self.post_async(body, connections)

        return asyncio.run(alone())

    def connections(self, most: int | None = None) -> "httpx.AsyncClient":
        """Return an async context in which requests share connections, at most so many."""
        import httpx

        return httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=None,
            verify=certificates() if self.url.startswith("https:") else False,
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
        )

    async def post_async(
        self,
        body: dict[str, Any],
        connections: "httpx.AsyncClient",
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> Answer:
        """Return the server's answer as `post` does. `before` is awaited before each attempt, and
        counts as no part of its time."""
        import asyncio  # a coroutine can be stopped wherever it waits: connecting, between bytes

        left = self.timeout_seconds
        failure = NoAnswer("there was no time for an attempt")
        for attempt in range(self.retries + 1):
            if left <= 0:
                break
            if before is not None:
                await before()
            began = time.monotonic()
            try:
                return await asyncio.wait_for(self._exchange(body, connections), left)
            except (asyncio.TimeoutError, TimeoutError):
                raise NoAnswer(f"it took longer than {self.timeout_seconds:g} s") from None
            except NoAnswer as error:
                failure = error
            left -= time.monotonic() - began
            if attempt < self.retries:
                pause = max(self.pause_seconds * 2**attempt, failure.after_seconds)
                await asyncio.sleep(min(pause, max(0.0, left)))
                left -= pause
        raise failure

    async def _exchange(self, body: dict[str, Any], connections: "httpx.AsyncClient") -> Answer:
        import httpx

        headers = {"Accept": "application/json", "Accept-Encoding": "identity", **self.headers}
        headers["Content-Type"] = "application/json"
        content = json.dumps(body).encode()  # in ASCII: texts may hold lone surrogates
        try:
            async with connections.stream(
                "POST", self.url, content=content, headers=headers
            ) as reply:
                if reply.status_code == 429 or reply.status_code >= 500:
                    after = reply.headers.get("retry-after", "")
                    seconds = float(after) if after.isdecimal() else 0.0
                    raise NoAnswer(f"its status is {reply.status_code}", seconds)
                return Answer(reply.status_code, await self._read(reply))
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise NoAnswer(f"{type(error).__name__}: {one_line(error)}") from None

    async def _read(self, reply: "httpx.Response") -> bytes:
        if reply.headers.get("content-encoding", "identity").lower() != "identity":
            raise BadAnswer("it is compressed, though that was not asked for")
        too_large = BadAnswer(f"it has more than {self.max_bytes:,} bytes")
        length = reply.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.max_bytes:
            raise too_large
        content = bytearray()
        async for chunk in reply.aiter_raw():  # as sent: nothing is ever unpacked
            content += chunk
            if len(content) > self.max_bytes:
                raise too_large
        return bytes(content)


@cache
def certificates() -> "ssl.SSLContext":
    """Return the system's certificates, read once: that takes longer than most requests."""
    import ssl

    return ssl.create_default_context()
