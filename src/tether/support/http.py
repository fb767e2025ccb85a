"""POST JSON to a server that is trusted with nothing. Imports no torch.

One deadline covers all attempts, from the first connection to the last byte, so that a server that
drips costs no more time than one that is down. An answer is read up to a size and never unpacked.
Neither redirects nor proxies and passwords of the environment are followed: only this address.
"""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from tether.errors import UserError, one_line

if TYPE_CHECKING:
    import ssl

    import httpx


class NoAnswer(Exception):
    """The server could not be reached, was busy or did not finish; another attempt may help."""


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

    May be used by several threads at once, but not inside a running event loop.
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
        import asyncio  # a coroutine can be stopped wherever it waits: connecting, between bytes

        async def attempts() -> Answer:
            failure = NoAnswer("there was no time for an attempt")
            for attempt in range(self.retries + 1):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                try:
                    return await asyncio.wait_for(self._exchange(body, verify), left)
                except (asyncio.TimeoutError, TimeoutError):
                    raise NoAnswer(f"it took longer than {self.timeout_seconds:g} s") from None
                except NoAnswer as error:
                    failure = error
                if attempt < self.retries:
                    pause = self.pause_seconds * 2**attempt
                    await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            raise failure

        verify = certificates() if self.url.startswith("https:") else False
        deadline = time.monotonic() + self.timeout_seconds
        return asyncio.run(attempts())

    async def _exchange(self, body: dict[str, Any], verify: "ssl.SSLContext | bool") -> Answer:
        import httpx

        headers = {"Accept": "application/json", "Accept-Encoding": "identity", **self.headers}
        client = httpx.AsyncClient(
            trust_env=False, follow_redirects=False, timeout=None, verify=verify
        )
        try:
            async with client, client.stream("POST", self.url, json=body, headers=headers) as reply:
                if reply.status_code == 429 or reply.status_code >= 500:
                    raise NoAnswer(f"its status is {reply.status_code}")
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
