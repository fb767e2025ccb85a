"""The page's server: fixed paths, GET only, one process and one thread.

Every handler is short and runs in the event loop: a few milliseconds of reading what is new. A
name in a path is looked up in a listing of what there is, and never becomes part of a file name.
"""

import errno
import importlib
import importlib.util
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tether.errors import UserError
from tether.view import api, batch, notices, pictures, samples
from tether.view.run_reader import Folder, Run
from tether.view.security import Guard, is_loopback

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


def serve(folder: Folder, host: str, port: int, demo: bool, ready: Callable[[str], None]) -> None:
    """Serve until interrupted; `ready` is told the address once it answers.

    Where other machines can reach the socket, the address holds a token that the page asks for.
    """
    with bind(host, port) as listener:
        port = listener.getsockname()[1]
        token = None if is_loopback(listener) else secrets.token_urlsafe(24)
        ready(shown_address(host, port) + ("" if token is None else f"/?token={token}"))
        make_server(make_app(folder, host, port, demo, token)).run(sockets=[listener])


def shown_address(host: str, port: int) -> str:
    """Return what to type in a browser: the machine's name for a server on all addresses."""
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: Guard) -> uvicorn.Server:
    """Make a server that logs warnings only."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", ws="none", server_header=False
    )
    return uvicorn.Server(config)


def bind(host: str, port: int) -> socket.socket:
    """Listen on an address; what cannot be is a UserError that names the option."""
    if not 0 <= port <= 65535:
        raise UserError(f"--port is {port}, but a port is a number from 0 to 65535.")
    try:
        family = socket.getaddrinfo(host, None)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise UserError(f"--host {host} is not an address of this machine.") from None
        reason = os.strerror(error.errno or 0).lower()
        raise UserError(
            f"--port {port} on {host} cannot be used: {reason}; write another, such as "
            f"--port {port + 1 if port < 65535 else 8377}."
        ) from None


def make_app(
    folder: Folder, host: str, port: int, demo: bool = False, token: str | None = None
) -> Guard:
    """Make the application, with `token` for one that other machines can reach."""
    pages = Pages(folder, demo)
    run = "/api/runs/{run}"
    routes = [
        Route("/", pages.index),
        Route("/static/{name}", pages.static),
        Route("/plotly.min.js", pages.plotly),
        Route("/api/runs", pages.runs),
        Route(run, pages.run),
        Route(f"{run}/series", pages.series),
        Route(f"{run}/evals", pages.evals),
        Route(f"{run}/events", pages.events),
        Route(f"{run}/notices", pages.notices),
        Route(f"{run}/timeline", pages.timelines),
        Route(f"{run}/timeline/{{iteration}}", pages.timeline),
        Route(f"{run}/heldout/{{iteration}}", pages.heldout),
        Route(f"{run}/history", pages.history),
        Route(f"{run}/rollouts/{{iteration}}", pages.rows),
        Route(f"{run}/rollouts/{{iteration}}/histograms", pages.histograms),
        Route(f"{run}/rollouts/{{iteration}}/heat/{{column}}", pages.heat),
        Route(f"{run}/rollouts/{{iteration}}/whatif", pages.batch_what_if),
        Route(f"{run}/rollouts/{{iteration}}/{{row}}", pages.row),
        Route(f"{run}/rollouts/{{iteration}}/{{row}}/whatif", pages.what_if),
    ]
    handlers = {
        HTTPException: _say_http,
        api.NotFound: _say(404),
        UserError: _say(400),
        Exception: _say_broken,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Guard(app, host, port, token)


class Pages:
    """One handler per path."""

    def __init__(self, folder: Folder, demo: bool) -> None:
        self.folder, self.demo = folder, demo
        self.loading = threading.Thread()

    async def index(self, request: Request) -> Response:
        return _file(STATIC / "index.html")

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in static_names():
            raise api.NotFound("There is no such file.")
        return _file(STATIC / name)

    async def plotly(self, request: Request) -> Response:
        """Send plotly's five megabytes once: later the browser asks whether they have changed."""
        path = plotly_file()
        status = path.stat()
        tag = f'"{status.st_size:x}-{status.st_mtime_ns:x}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(path.read_bytes(), media_type=TYPES[path.suffix], headers=headers)

    async def runs(self, request: Request) -> Response:
        return _json(api.list_runs(self.folder, self.demo))

    async def run(self, request: Request) -> Response:
        return _json(api.describe_run(self._run(request)))

    async def series(self, request: Request) -> Response:
        query = request.query_params
        names = list(dict.fromkeys(name for name in query.get("names", "").split(",") if name))
        since, generation = _count(query.get("since", "0"), "since"), query.get("generation")
        known = None if generation is None else _count(generation, "generation")
        return _json(api.read_series(self._run(request), names, since, known))

    async def evals(self, request: Request) -> Response:
        return _json(api.read_evals(self._run(request)))

    async def events(self, request: Request) -> Response:
        query = request.query_params
        offset = _count(query.get("offset", "0"), "offset")
        limit = _count(query.get("limit", "100"), "limit")
        return _json(api.read_events(self._run(request), offset, limit))

    async def notices(self, request: Request) -> Response:
        return _json(notices.read_notices(self._run(request)))

    async def timelines(self, request: Request) -> Response:
        return _json(api.list_timelines(self._run(request)))

    async def timeline(self, request: Request) -> Response:
        return _json(api.read_timeline(self._run(request), _number(request, "iteration")))

    async def rows(self, request: Request) -> Response:
        listed = _json(api.list_rows(self._run(request), _number(request, "iteration")))
        if not self.loading.is_alive() and "tether.view.whatif" not in sys.modules:
            self.loading = _load_what_if()
        return listed

    async def heldout(self, request: Request) -> Response:
        return _json(samples.read_heldout(self._run(request), _number(request, "iteration")))

    async def history(self, request: Request) -> Response:
        query = request.query_params
        line, since = (
            _count(query.get("line", ""), "line"),
            _count(query.get("since", "0"), "since"),
        )
        return _json(samples.read_history(self._run(request), query.get("file"), line, since))

    async def histograms(self, request: Request) -> Response:
        return _json(pictures.read_histograms(self._run(request), _number(request, "iteration")))

    async def heat(self, request: Request) -> Response:
        column = request.path_params["column"]
        return _json(pictures.read_heat(self._run(request), _number(request, "iteration"), column))

    async def batch_what_if(self, request: Request) -> Response:
        iteration, query = _number(request, "iteration"), request.query_params
        return _json(batch.batch_what_if(self._run(request), iteration, query))

    async def row(self, request: Request) -> Response:
        iteration, row = _number(request, "iteration"), _number(request, "row")
        return _json(api.describe_row(self._run(request), iteration, row))

    async def what_if(self, request: Request) -> Response:
        iteration, row = _number(request, "iteration"), _number(request, "row")
        return _json(api.what_if(self._run(request), iteration, row, request.query_params))

    def _run(self, request: Request) -> Run:
        run = self.folder.runs().get(request.path_params["run"])
        if run is None:
            raise api.NotFound("There is no such run.")
        return run


def _load_what_if() -> threading.Thread:
    """Load torch beside the answers: who has seen a list of rows is about to open one."""
    loading = threading.Thread(
        target=importlib.import_module, args=["tether.view.whatif"], daemon=True
    )
    loading.start()
    return loading


def static_names() -> set[str]:
    """Return the names of the page's own files."""
    return {path.name for path in STATIC.iterdir() if path.suffix in TYPES and path.is_file()}


def plotly_file() -> Path:
    """Return the path of plotly's JavaScript; the package itself is not imported."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise UserError("plotly is not installed; pip install plotly.")
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


def _file(path: Path) -> Response:
    return Response(path.read_bytes(), media_type=TYPES[path.suffix])


def _json(body: api.Body, status: int = 200) -> Response:
    return Response(api.to_json(body), status, media_type="application/json")


def _count(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise UserError(f"{name} is {text[:40]!r}, but it is a whole number from 0 on.")
    return int(text)


def _number(request: Request, name: str) -> int:
    """Return a number in a path; anything else is not found."""
    text = request.path_params[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise api.NotFound(f"There is no such {name}.")
    return int(text)


def _say(status: int) -> Callable[[Request, Exception], Response]:
    return lambda request, error: _json({"error": str(error)}, status)


def _say_http(request: Request, error: HTTPException) -> Response:
    return _json({"error": error.detail}, error.status_code)


def _say_broken(request: Request, error: Exception) -> Response:
    return _json({"error": "This could not be shown; the terminal says why."}, 500)
