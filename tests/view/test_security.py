"""The page answers its own browser tab, about its own folder, and nobody else about anything.

Test clients tidy paths up before they send them, so these tests speak to a real socket, by hand.
"""

import inspect
import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import table
from starlette.datastructures import Headers

from tether.cli.view import view
from tether.view.run_reader import Folder
from tether.view.security import Guard, allowed_hosts
from tether.view.server import bind, make_app, make_server
from view.conftest import MadeRun

CANARY = "canary-7f3a9c"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder of runs with a secret beside it, and links that lead there."""
    top = tmp_path_factory.mktemp("place")
    (top / "secret.txt").write_text(CANARY)
    outside = MadeRun(top / "outside" / "elsewhere")
    outside.append("metrics", {"iteration": 9, "secret/mean": 1.0, "note": CANARY})
    (outside.directory / "config.yaml").write_text(f"schema: 1\nseed: {CANARY}\n")
    (outside.directory / "rollouts" / "000000.jsonl").write_text(f'{{"prompt": "{CANARY}"}}\n')
    good = MadeRun(top / "runs" / "good").directory
    (good / "rollouts" / "000000.jsonl").write_text('{"schema": 1, "prompt": "p"}\n')
    (good / "secret.txt").write_text("inside, but no file of a run: " + CANARY)

    (top / "runs" / "linked").symlink_to(outside.directory)
    linked_files = MadeRun(top / "runs" / "files").directory
    for name in ("metrics.jsonl", "evals.jsonl", "events.jsonl", "config.yaml"):
        (linked_files / name).unlink()
        (linked_files / name).symlink_to(outside.directory / name)
    (linked_files / "rollouts" / "000000.jsonl").symlink_to(top / "secret.txt")
    linked_folder = MadeRun(top / "runs" / "folder").directory
    (linked_folder / "rollouts").rmdir()
    (linked_folder / "rollouts").symlink_to(outside.directory / "rollouts")
    return top


@pytest.fixture(scope="module")
def port(place):
    """A real server on a real socket."""
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = make_server(make_app(Folder(place / "runs"), "127.0.0.1", port))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield port
    server.should_exit = True
    thread.join(timeout=10)
    listener.close()


def send(port: int, head: str) -> tuple[int, str]:
    """(status, everything that came back) for a request written out byte for byte."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head.encode("utf-8", "surrogateescape") + b"\r\n\r\n")
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    text = received.decode("utf-8", "replace")
    return int(text.split(" ", 2)[1]), text


def get(port: int, path: str, *headers: str, verb: str = "GET") -> tuple[int, str]:
    lines = [f"{verb} {path} HTTP/1.1", *headers, "Connection: close"]
    if not any(line.lower().startswith("host:") for line in headers):
        lines.insert(1, f"Host: 127.0.0.1:{port}")
    return send(port, "\r\n".join(lines))


def traversals(place: Path) -> list[str]:
    """Ways to say "outside" in one or more path segments."""
    up = [
        "..", "%2e%2e", "%252e%252e", "..%00", "....", ".%2e", "%c0%ae%c0%ae", "..;",
        "%uff0e%uff0e", "．．",
    ]  # fmt: skip
    separators = ["/", "%2f", "%252f", "\\", "%5c", "%255c", "//", "%c0%af", "/./"]
    targets = ["secret.txt", "outside/elsewhere", "outside/elsewhere/config.yaml"]
    made = [
        separator.join([dots] * depth + target.split("/"))
        for dots, separator in itertools.product(up, separators)
        for target, depth in zip(targets, (1, 2, 3), strict=True)
    ]
    absolute = [str(place / "secret.txt"), "/etc/passwd", "file:///etc/passwd", "C:\\secret.txt"]
    odd = ["secret.txt", "secret.txt%00.jsonl", "good%00", "good/../../secret.txt", "~", "*", "."]
    encoded = [path.replace("/", "%2F") for path in absolute]
    return [*absolute, *encoded, *odd, *made]


ENDPOINTS = [
    "/{}",
    "/static/{}",
    "/static/../{}",
    "/plotly.min.js/{}",
    "/api/{}",
    "/api/runs/{}",
    "/api/runs/{}/series?names=secret/mean",
    "/api/runs/{}/evals",
    "/api/runs/{}/events",
    "/api/runs/{}/notices",
    "/api/runs/{}/rollouts/0",
    "/api/runs/{}/rollouts/0/0",
    "/api/runs/good/{}",
    "/api/runs/good/rollouts/{}",
    "/api/runs/good/rollouts/0/{}",
    "/api/runs/good/rollouts/{}/0/whatif",
    "/api/runs/good/series?names={}",
]
LINKED = ["linked", "files", "folder"]


def test_no_path_reaches_a_byte_outside_the_runs(port, place):
    """S3: more than 200 payloads at every endpoint."""
    payloads = traversals(place)
    assert len(set(payloads)) > 200
    password_line = re.compile(r"root:[^:]*:0:0:")
    for payload, endpoint in itertools.product(payloads, ENDPOINTS):
        path = endpoint.format(payload)
        status, text = get(port, path)
        assert CANARY not in text, path
        assert not password_line.search(text), path
        # Only where the payload stands in a query is there anything to answer.
        fine = (200, 400) if endpoint.endswith("names={}") else (400, 404)
        assert status in fine, (status, path)


@table("run", LINKED)
@table(
    "tail",
    ["", "/series?names=secret/mean", "/evals", "/events", "/notices", "/rollouts/0",
     "/rollouts/0/0", "/rollouts/0/0/whatif"],
)  # fmt: skip
def test_no_link_is_followed_out_of_the_folder(port, run, tail):
    status, text = get(port, f"/api/runs/{run}{tail}")
    assert CANARY not in text
    assert 'secret/mean": [1.0' not in text
    assert status in (200, 404)


def test_links_that_lead_out_are_said(port):
    _, listing = get(port, "/api/runs")
    assert "linked is a link that leads out of the folder." in listing
    assert '"id": "linked"' not in listing
    assert CANARY not in listing
    _, described = get(port, "/api/runs/files")
    assert "metrics.jsonl is a link that leads out of the folder." in described


def test_a_link_that_stays_inside_is_followed(tmp_path):
    MadeRun(tmp_path / "one")
    (tmp_path / "newest").symlink_to(tmp_path / "one")
    assert list(Folder(tmp_path).runs()) == ["newest", "one"]


def test_a_pipe_in_place_of_a_file_does_not_hang_the_page(made, ask):
    (made.directory / "metrics.jsonl").unlink()
    os.mkfifo(made.directory / "metrics.jsonl")
    assert "metrics.jsonl is not a regular file." in ask()["problems"]


HOSTS = [
    "evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1",
    "127.0.0.1.evil.example:{port}", "localhost.evil.example:{port}", "0.0.0.0:{port}",
    "[::]:{port}", "127.0.0.1:{port}@evil.example", "", "127.0.0.1:{port}, evil.example",
]  # fmt: skip
ORIGINS = [
    "http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1",
    "http://127.0.0.1", "http://localhost.evil.example:{port}", "file://", "",
]  # fmt: skip
VERBS = ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get"]
GOOD_HOSTS = ["127.0.0.1:{port}", "localhost:{port}", "[::1]:{port}", "LOCALHOST:{port}"]


@table("path", ["/", "/api/runs", "/static/style.css", "/nothing"])
def test_every_pair_of_foreign_host_origin_and_verb_is_refused(port, path):
    """S4: each foreign thing alone, and every pair of them."""
    own_host = "127.0.0.1:{port}"
    pairs = [
        *itertools.product(HOSTS, [None, *ORIGINS], ["GET", *VERBS]),
        *itertools.product([own_host], ORIGINS, ["GET", *VERBS]),
        *itertools.product([own_host], [None], VERBS),
    ]
    for host, origin, verb in pairs[:: 1 if path == "/api/runs" else 7]:
        headers = [f"Host: {host}"] + ([] if origin is None else [f"Origin: {origin}"])
        status, text = get(port, path, *(h.format(port=port) for h in headers), verb=verb)
        assert status in (400, 403, 405), (host, origin, verb)
        assert "good" not in text
        assert "<html" not in text
        if host == own_host and origin is None and verb.isupper() and verb != "CONNECT":
            assert status == 405
            assert "allow: GET, HEAD" in text


@table("host", GOOD_HOSTS)
@table("verb", ["GET", "HEAD"])
def test_its_own_names_are_answered(port, host, verb):
    name = host.format(port=port)
    origin = f"Origin: http://{name.lower()}"
    for headers in (
        [],
        [origin],
        [origin, "Sec-Fetch-Site: same-origin"],
        ["Sec-Fetch-Site: none"],
    ):
        status, text = get(port, "/api/runs", f"Host: {name}", *headers, verb=verb)
        assert status == 200
        assert ('"runs"' in text) is (verb == "GET")


@table("site", ["cross-site", "same-site", "nonsense"])
def test_a_fetch_that_another_site_began_is_refused(port, site):
    status, _ = get(port, "/api/runs", f"Host: 127.0.0.1:{port}", f"Sec-Fetch-Site: {site}")
    assert status == 403


def test_two_hosts_or_none_are_refused(port):
    both = [f"Host: 127.0.0.1:{port}", "Host: evil.example"]
    assert get(port, "/api/runs", *both)[0] in (400, 403)
    assert send(port, "GET /api/runs HTTP/1.0")[0] in (400, 403)


HEADERS = {
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


@table(
    ("path", "verb", "host"),
    [
        ("/", "GET", "127.0.0.1"),
        ("/api/runs", "GET", "127.0.0.1"),
        ("/api/runs/good/rollouts/0/0/whatif?kl.in_reward.coef=x", "GET", "127.0.0.1"),
        ("/plotly.min.js", "HEAD", "127.0.0.1"),
        ("/nothing", "GET", "127.0.0.1"),
        ("/api/runs", "POST", "127.0.0.1"),
        ("/api/runs", "GET", "evil.example"),
    ],
)
def test_every_answer_carries_the_headers(port, path, verb, host):
    _, text = get(port, path, f"Host: {host}:{port}", verb=verb)
    head = text.split("\r\n\r\n")[0].lower().split("\r\n")
    keeping = "no-cache" if path == "/plotly.min.js" else "no-store"
    for name, value in {**HEADERS, "cache-control": keeping}.items():
        assert f"{name}: {value.lower()}" in head
    policy = next(line for line in head if line.startswith("content-security-policy: "))
    for part in ("default-src 'none'", "script-src 'self';", "frame-ancestors 'none'"):
        assert part in policy
    assert "access-control" not in text.lower()
    assert not any(line.startswith("server:") for line in head)


def test_answers_of_the_api_are_json_and_nothing_else(port):
    for path in ("/api/runs", "/api/runs/good", "/api/runs/nobody", "/api/runs/good/rollouts/0"):
        _, text = get(port, path)
        assert "content-type: application/json" in text.lower()


def test_the_page_listens_on_this_machine_alone_unless_told():
    assert inspect.signature(view).parameters["host"].default == "127.0.0.1"
    with bind("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@table(
    ("host", "port", "header", "allowed"),
    [
        ("127.0.0.1", 80, "127.0.0.1", True),
        ("127.0.0.1", 80, "localhost:80", True),
        ("127.0.0.1", 8377, "127.0.0.1", False),
        ("box.lan", 8377, "box.lan:8377", True),
        ("127.0.0.1", 8377, "box.lan:8377", False),
        ("fd00::1", 8377, "[fd00::1]:8377", True),
    ],
)
def test_only_the_address_that_was_given_is_a_name_of_the_page(host, port, header, allowed):
    assert (header in allowed_hosts(host, port)) is allowed


def test_the_verb_is_looked_at_last():
    guard = Guard(None, "127.0.0.1", 8377)
    status, _ = guard.refusal("POST", Headers({"host": "evil.example"}))
    assert status == 403


@pytest.fixture(scope="module")
def reachable(place):
    """(port, what was printed) of a page that other machines can reach."""
    words = [sys.executable, "-m", "tether", "view", place / "runs", "--host", "0.0.0.0"]
    with subprocess.Popen(
        [*map(str, words), "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        said = server.stdout.readline()
        found = re.search(r"http://[^/ ]+:(\d+)", said)
        yield int(found[1]), said, server.stderr
        server.kill()


def test_a_page_beyond_this_machine_asks_for_a_token(reachable):
    """Also of a Host that says localhost: anybody can write that."""
    port, said, stderr = reachable
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"192.168.0.7:{port}"):
        for path in ("/", "/api/runs", "/?token=", "/?token=x", "/api/runs?token=x"):
            status, text = get(port, path, f"Host: {host}")
            assert status == 403, (host, path)
            assert "good" not in text
    token = re.search(r"/\?token=([\w-]{32})", said)[1]
    assert get(port, f"/api/runs?token={token}", f"Host: 192.168.0.7:{port}")[0] == 403
    assert "can read these runs" in stderr.readline()


def test_the_printed_address_opens_the_page_from_another_machine(reachable):
    port, said, _ = reachable
    token, host = re.search(r"/\?token=([\w-]{32})", said)[1], f"Host: 192.168.0.7:{port}"
    status, text = get(port, f"/?token={token}", host)
    assert status == 303
    assert "location: /\r" in text.lower()
    kept = re.search(r"set-cookie: ([^;]+); Path=/; HttpOnly; SameSite=Strict", text)[1]
    cookie = f"Cookie: other=1; {kept}"
    for path in ("/", "/static/api.js", "/api/runs"):
        assert get(port, path, host, cookie)[0] == 200, path
    assert get(port, "/api/runs", host, cookie, f"Origin: http://192.168.0.7:{port}")[0] == 200
    assert get(port, "/api/runs", host, cookie, "Origin: http://evil.example")[0] == 403
    assert get(port, "/api/runs", host, cookie, "Sec-Fetch-Site: cross-site")[0] == 403
    assert get(port, "/api/runs", host, cookie, verb="POST")[0] == 405
    assert get(port, "/api/runs", host, cookie[:-1])[0] == 403
