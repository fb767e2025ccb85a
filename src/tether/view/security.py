"""Refuse requests that do not come from this page itself.

A page from elsewhere can make a browser send requests to 127.0.0.1. It is told apart by the Host
it thinks it speaks to (DNS rebinding), by its Origin, and by what the browser says of the fetch.

A server that other machines can reach asks for a token instead of a Host: the address that it
prints holds the token, and the first visit leaves it in a cookie.
"""

import ipaddress
import json
import secrets
import socket
from collections.abc import Iterable
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
VERBS = ("GET", "HEAD")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; font-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Middleware that refuses a request before the application sees it and adds headers."""

    def __init__(self, app: ASGIApp, host: str, port: int, token: str | None = None) -> None:
        self.app = app
        self.hosts = allowed_hosts(host, port)
        self.token = token
        self.cookie = f"tether_{port}"  # cookies do not tell ports apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # nothing here speaks anything else

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if self._brings_token(scope):
            return await _redirect(f"{self.cookie}={self.token}", send_with_headers)
        refusal = self.refusal(scope["method"], Headers(scope=scope))
        if refusal is None:
            await self.app(scope, receive, send_with_headers)
        else:
            await _refuse(*refusal, send_with_headers)

    def refusal(self, verb: str, headers: Headers) -> tuple[int, str] | None:
        """Return status and sentence for a request that is refused, None for one that is not."""
        hosts = headers.getlist("host")
        if self.token is None:
            known = self.hosts
            if len(hosts) != 1 or hosts[0].lower() not in known:
                return 403, "This page answers under its own address only; give another by --host."
        else:
            known = {host.lower() for host in hosts}
            if not self._shows_token(headers):
                return 403, "Open the page by the address that `tether view` printed."
        origins = headers.getlist("origin")
        if any(origin.lower() not in {f"http://{host}" for host in known} for origin in origins):
            return 403, "Another page asked, and this one answers only itself."
        if not set(headers.getlist("sec-fetch-site")) <= {"same-origin", "none"}:
            return 403, "Another site asked, and this page answers only itself."
        if verb not in VERBS:
            return 405, "This page only reads: GET and HEAD."
        return None

    def _brings_token(self, scope: Scope) -> bool:
        """Return whether this is the first visit, by the printed address."""
        if self.token is None or scope["path"] != "/" or scope["method"] != "GET":
            return False
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])
        return _same(given[0], self.token)

    def _shows_token(self, headers: Headers) -> bool:
        pairs = [pair.strip() for line in headers.getlist("cookie") for pair in line.split(";")]
        wanted = f"{self.cookie}={self.token}"
        return any(_same(pair, wanted) for pair in pairs)


def _same(given: str, wanted: str) -> bool:
    """Compare in a time that does not say how much of it is right."""
    return secrets.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only this machine can reach a listening socket."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def allowed_hosts(host: str, port: int) -> frozenset[str]:
    """Return what a Host header may say; browsers leave port 80 out."""
    names: Iterable[str] = {*LOOPBACK, f"[{host}]" if ":" in host else host.lower()}
    with_port = {f"{name}:{port}" for name in names}
    return frozenset(with_port | set(names) if port == 80 else with_port)


async def _redirect(cookie: str, send: Send) -> None:
    """Redirect to the page itself, without the token in its address."""
    headers = [
        (b"location", b"/"),
        (b"set-cookie", f"{cookie}; Path=/; HttpOnly; SameSite=Strict".encode()),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _refuse(status: int, sentence: str, send: Send) -> None:
    body = json.dumps({"error": sentence}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if status == 405:
        headers.append((b"allow", ", ".join(VERBS).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
