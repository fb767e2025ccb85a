"""Who may ask: this page, in a browser of this machine, and nobody through it.

A page from elsewhere can make a browser send requests to 127.0.0.1. It is told apart by the Host
it thinks it speaks to (DNS rebinding), by its Origin, and by what the browser says of the fetch.
"""

import json
from collections.abc import Iterable

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
    """Refuses a request before the application sees it, and puts headers on every answer."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self.app = app
        self.hosts = allowed_hosts(host, port)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # nothing here speaks anything else

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self.refusal(scope["method"], Headers(scope=scope))
        if refusal is None:
            await self.app(scope, receive, send_with_headers)
        else:
            await _refuse(*refusal, send_with_headers)

    def refusal(self, verb: str, headers: Headers) -> tuple[int, str] | None:
        """(status, sentence) of a request that is not for us."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return 403, "This page answers under its own address only; give another by --host."
        origins = headers.getlist("origin")
        if any(
            origin.lower() not in {f"http://{host}" for host in self.hosts} for origin in origins
        ):
            return 403, "Another page asked, and this one answers only itself."
        if not set(headers.getlist("sec-fetch-site")) <= {"same-origin", "none"}:
            return 403, "Another site asked, and this page answers only itself."
        if verb not in VERBS:
            return 405, "This page only reads: GET and HEAD."
        return None


def allowed_hosts(host: str, port: int) -> frozenset[str]:
    """What a Host header may say; browsers leave port 80 out."""
    names: Iterable[str] = {*LOOPBACK, f"[{host}]" if ":" in host else host.lower()}
    with_port = {f"{name}:{port}" for name in names}
    return frozenset(with_port | set(names) if port == 80 else with_port)


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
