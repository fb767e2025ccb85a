"""S9: copied runs that name code or addresses, text that spells special tokens, secrets in
addresses and arguments, servers bound beyond loopback."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from faults.attempt import attempt, no_traceback, refused, train
from faults.hostile_models import Tripwire
from faults.row import Row, tally
from faults.spelt_tokens import special_token_cases
from faults.world import World

SECRET = "hunter2-7f3a9c"
CODE = """
open({canary!r}, "w").close()
def tool(query): return "7"
def score(response): return 0.5
class Game:
    def reset(self, row): return "go"
    def step(self, text): return "", 1.0, True
"""
ROOM = {"max_observation_tokens": 64, "max_response_tokens": 80}
FIELDS = {
    "rollout.tools.0.kind": {"rollout": {"tools": [{"kind": "{code}:tool"}], **ROOM}},
    "rollout.environment": {"rollout": {"environment": "{code}:Game", **ROOM}},
    "rollout.tools.0.url": {
        "rollout": {"tools": [{"kind": "search", "url": "http://127.0.0.1:9/retrieve"}], **ROOM}
    },
    "reward.kind": {"reward": {"kind": "{code}:score"}},
}


@dataclass(frozen=True)
class Case:
    name: str
    attempt: Callable[[World, Path, Path], str | None]  # world, folder, a finished run


def row_s9(world: World, folder: Path, tries: int, seed: int) -> Row:
    trained = train(folder / "trained", world.recipe, "--train.iterations", "1")
    if trained.code != 0:
        return Row("S9", "copied runs, text, secrets, servers", 0, 0, trained.said[-200:])
    verdicts = []
    for number, case in enumerate(CASES[:tries]):
        problem = case.attempt(world, folder / str(number), trained.run)
        verdicts.append(None if problem is None else f"{case.name}: {problem}")
    return tally("S9", "copied runs, text, secrets, servers", verdicts)


def _copied(command: str, field: str) -> Case:
    def run(world: World, folder: Path, finished: Path) -> str | None:
        canary, code = folder / "canary", folder / "x.py"
        shutil.copytree(finished, folder / "runs" / "cool")
        code.write_text(CODE.format(canary=str(canary)))
        file = folder / "runs" / "cool" / "config.yaml"
        config = yaml.safe_load(file.read_text())
        config["reward"] = {"kind": "exact_match", "arguments": {"answer": "1"}}
        for section, fields in FIELDS[field].items():
            config[section] = {**config[section], **fields}
        config["reward"].pop("arguments" if field == "reward.kind" else "", None)
        file.write_text(yaml.safe_dump(config).replace("{code}", str(code)))
        words = {
            "generate": ("generate", "1+1=?", "--model", file.parent),
            "trace": ("trace", "1+1=?", "--model", file.parent),
            "eval": ("eval", file.parent),
        }
        tried = attempt(folder, *words[command], sabotage=Tripwire(canary))
        if canary.exists():
            return "its wish was granted"
        return refused(tried, field, "--trust-run")

    return Case(f"{command} of a run with {field}", run)


def _spelt(number: int) -> Case:
    """Special tokens spelt by a prompt, a role, a response, a conversation, the policy, a tool."""

    def run(world: World, folder: Path, finished: Path) -> str | None:
        return special_token_cases(world, folder)[number]()

    return Case(f"special tokens spelt in text, {number}", run)


def _secret_in_address(world: World, folder: Path, finished: Path) -> str | None:
    url = f"http://me:{SECRET}@127.0.0.1:9/retrieve"
    tools = f"[{{kind: search, url: '{url}'}}]"
    fields = ("--rollout.tools", tools, "--rollout.max_observation_tokens", "64")
    tried = train(folder, world.recipe, *fields, "--rollout.max_response_tokens", "80")
    if SECRET in tried.said or tried.run.exists():
        return "the password was shown or written"
    return refused(tried, "rollout.tools.0", "password")


@dataclass(frozen=True)
class SetKey:
    """Called in the new process."""

    key: str

    def __call__(self) -> None:
        os.environ["MY_KEY"] = self.key


def _secret_key(key: str) -> Callable[[World, Path, Path], str | None]:
    def run(world: World, folder: Path, finished: Path) -> str | None:
        words = ("--endpoint", "http://127.0.0.1:9", "--endpoint-model", "m")
        words += ("--endpoint-key", "MY_KEY", "--recipe", str(world.recipe))
        tried = attempt(folder, "eval", *words, sabotage=SetKey(key))
        return "the key was shown" if SECRET in tried.said else refused(tried, "key")

    return run


def _secret_in_export(world: World, folder: Path, finished: Path) -> str | None:
    shutil.copytree(finished, folder / "copy")
    file = folder / "copy" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    config["reward"]["arguments"] = {"api_key": SECRET}
    file.write_text(yaml.safe_dump(config))
    tried = attempt(folder, "export", file.parent, folder / "model")
    if tried.code != 0:
        return no_traceback(tried) or tried.complaint
    held = [path.name for path in (folder / "model").rglob("*") if path.is_file()
            and SECRET.encode() in path.read_bytes()]  # fmt: skip
    return f"the secret is in {held[0]}" if held else None


def _served(*words: str | Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "tether", *map(str, words), "--port", "0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _status(port: int, request: str) -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(f"{request}\r\nConnection: close\r\n\r\n".encode())
        return int(connection.recv(100).split()[1])


def _page_beyond_loopback(world: World, folder: Path, finished: Path) -> str | None:
    with _served("view", finished.parent, "--host", "0.0.0.0") as server:
        try:
            said = server.stdout.readline()
            port = int(re.search(r":(\d+)/", said)[1])
            for host in (f"localhost:{port}", f"192.168.0.7:{port}"):
                got = _status(port, f"GET /api/runs HTTP/1.1\r\nHost: {host}")
                if got != 403:
                    return f"{host} got {got} without a token"
            token = re.search(r"token=(\S+)", said)[1]
            got = _status(port, f"GET /?token={token} HTTP/1.1\r\nHost: 192.168.0.7:{port}")
            return None if got == 303 else f"the printed address got {got}"
        finally:
            server.kill()


def _retriever_by_another_name(world: World, folder: Path, finished: Path) -> str | None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_text('{"id": 1, "contents": "a town"}\n')
    with _served("serve-retriever", folder / "corpus.jsonl") as server:
        try:
            port = int(re.search(r":(\d+)/", server.stdout.readline())[1])
            body = '{"queries": ["a"]}'
            head = f"POST /retrieve HTTP/1.1\r\nContent-Length: {len(body)}\r\nHost: "
            wrong = _status_with(port, f"{head}evil.example:{port}", body)
            right = _status_with(port, f"{head}127.0.0.1:{port}", body)
            return None if (wrong, right) == (403, 200) else f"{wrong} and {right}"
        finally:
            server.kill()


def _status_with(port: int, head: str, body: str) -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(f"{head}\r\nConnection: close\r\n\r\n{body}".encode())
        return int(connection.recv(100).split()[1])


CASES = [
    _copied("generate", "rollout.tools.0.kind"),
    Case("a password in an address", _secret_in_address),
    Case("the page beyond loopback", _page_beyond_loopback),
    Case("a secret among a reward's arguments, exported", _secret_in_export),
    Case("a key with a newline inside", _secret_key(f"{SECRET}\nx")),
    Case("a key beyond ASCII", _secret_key(f"{SECRET}é")),
    Case("a retriever by another name", _retriever_by_another_name),
    _copied("trace", "rollout.tools.0.kind"),
    _copied("trace", "reward.kind"),
    _copied("eval", "rollout.environment"),
    _copied("eval", "reward.kind"),
    _copied("generate", "rollout.environment"),
    _copied("generate", "rollout.tools.0.url"),
    _copied("trace", "rollout.tools.0.url"),
    _copied("eval", "rollout.tools.0.url"),
    *map(_spelt, range(6)),
]
