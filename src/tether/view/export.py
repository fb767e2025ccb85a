"""Write the page as a folder that opens from disk, without a server.

A page from disk may not fetch files or load modules. So each answer becomes a script that puts
itself into `tether_export` under its path, and the page's modules become one plain script.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from tether.errors import UserError
from tether.view import api, notices, pictures, samples
from tether.view.run_reader import Folder, Run
from tether.view.security import CONTENT_SECURITY_POLICY
from tether.view.server import STATIC, plotly_file, static_names

ENTRY = "main.js"
BUNDLE = "app.js"
MAX_TIMELINES = 100  # the newest of a run, each in a file of its own
COMPONENT_SAFE = "!'()*-._~"  # what encodeURIComponent leaves as it is
IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"\./([\w.-]+)";$', re.MULTILINE)
EXPORT = re.compile(
    r"^export (?=(?:async function\*?|function\*?|class|const) (\w+))", re.MULTILINE
)
UNKNOWN = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)


def export_page(folder: Folder, directory: Path, demo: bool) -> int:
    """Write the page and all its answers; return the number of runs in it."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"--export {directory} exists and is not empty; name a new folder.")
    try:
        for name in ("static", "data"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        _write_page(directory)
        _write(directory, "/api/runs", api.list_runs(folder, demo))
        runs = folder.runs().values()
        for run in runs:
            for path, body in _answers(run):
                _write(directory, path, body)
    except OSError as error:
        raise UserError(f"--export {directory} cannot be written: {error.strerror}.") from None
    return len(runs)


def _answers(run: Run) -> Iterator[tuple[str, api.Body]]:
    """Yield every answer that the page may ask for about a run, except what-if."""
    base = f"/api/runs/{quote(run.id, safe=COMPONENT_SAFE)}"
    described = api.describe_run(run)
    yield base, described
    yield f"{base}/series", api.read_series(run, described["names"], 0, None)
    yield f"{base}/evals", api.read_evals(run)
    yield f"{base}/events", api.read_events(run, 0, api.MAX_EVENTS)
    yield f"{base}/notices", notices.read_notices(run)
    timelines = api.list_timelines(run)
    timelines["iterations"] = timelines["iterations"][-MAX_TIMELINES:]
    yield f"{base}/timeline", timelines
    for iteration in timelines["iterations"]:
        yield f"{base}/timeline/{iteration}", api.read_timeline(run, iteration)
    for iteration in described["heldout"]:
        yield f"{base}/heldout/{iteration}", samples.read_heldout(run, iteration)
    for iteration in described["rollouts"]:
        rows = api.list_rows(run, iteration)
        yield f"{base}/rollouts/{iteration}", rows
        yield f"{base}/rollouts/{iteration}/histograms", pictures.read_histograms(run, iteration)
        for column in described["columns"]:
            heat = pictures.read_heat(run, iteration, column)
            yield f"{base}/rollouts/{iteration}/heat/{column}", heat
        for row in rows["rows"]:
            number = row["row"]
            yield (
                f"{base}/rollouts/{iteration}/{number}",
                api.describe_row(run, iteration, number),
            )


def file_name(path: str) -> str:
    """Return the NAME.js of an answer. `path` is percent-encoded, so + and = are free."""
    return path.removeprefix("/api/").replace("/", "+").replace("%", "=") + ".js"


def as_script(path: str, body: api.Body) -> str:
    """Return one assignment, in ASCII without `<`, so that no text in it can end the script."""
    return f"tether_export[{_escape(path)}] = {_escape(body)};\n"


def _escape(value: api.Body | str) -> str:
    return api.to_json(value).replace("<", "\\u003c")


def _write(directory: Path, path: str, body: api.Body) -> None:
    (directory / "data" / file_name(path)).write_text(as_script(path, body), encoding="ascii")


def _write_page(directory: Path) -> None:
    index = (STATIC / "index.html").read_text(encoding="utf-8")
    (directory / "index.html").write_text(exported_index(index), encoding="utf-8")
    for name in static_names():
        if not name.endswith((".js", ".html")):
            (directory / "static" / name).write_bytes((STATIC / name).read_bytes())
    modules = {
        n: (STATIC / n).read_text(encoding="utf-8") for n in static_names() if n[-3:] == ".js"
    }
    (directory / "static" / BUNDLE).write_text(bundle(modules, ENTRY), encoding="utf-8")
    (directory / "plotly.min.js").write_bytes(plotly_file().read_bytes())


def exported_index(html: str) -> str:
    policy = CONTENT_SECURITY_POLICY.rpartition("; ")[0]  # frame-ancestors means nothing in a meta
    changes = {
        '<meta charset="utf-8">': '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f'<script type="module" src="static/{ENTRY}">': f'<script defer src="static/{BUNDLE}">',
        "<body>": '<body data-export="true">',
    }
    for old, new in changes.items():
        if html.count(old) != 1:
            raise ValueError(f"index.html has no single {old}")
        html = html.replace(old, new)
    return html


def bundle(modules: dict[str, str], entry: str) -> str:
    """Join modules into one plain script: each a function called once, after its imports."""
    order: list[str] = []
    _visit(entry, modules, order, ())
    parts = [_as_function(name, modules[name]) for name in order]
    return '"use strict";\n(() => {\nconst modules = {};\n' + "\n".join(parts) + "\n})();\n"


def _visit(name: str, modules: dict[str, str], order: list[str], above: tuple[str, ...]) -> None:
    if name in above:
        raise ValueError(f"modules import each other: {' -> '.join([*above, name])}")
    if name in order:
        return
    for match in IMPORT.finditer(modules[name]):
        _visit(match[2], modules, order, (*above, name))
    order.append(name)


def _as_function(name: str, source: str) -> str:
    exported = EXPORT.findall(source)
    body = EXPORT.sub("", IMPORT.sub(_as_constants, source))
    if left := UNKNOWN.search(body):
        raise ValueError(f"{name}: this form is not understood here: {left[0]}")
    return f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {", ".join(exported)} }};\n}})();'


def _as_constants(match: re.Match[str]) -> str:
    names = re.sub(r"\s+as\s+", ": ", match[1]).strip()
    return f'const {{ {names} }} = modules["{match[2]}"];'
