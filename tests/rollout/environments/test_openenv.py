"""OpenEnv through the adapter against a real server of the package as released.

The package's dependencies do not fit beside tether's, so it is in an environment of its own:
TETHER_OPENENV_PYTHON names its Python.
"""

import json
import os
import socket
import subprocess
import threading
import time

import pytest
from helpers import table

from rollout.talk import say, settings, vocabulary
from tether.config import DataSection
from tether.errors import UserError
from tether.rollout.tools.build import build_episode_source
from tether.rollout.turns import close_all
from tether.types import Prompts

pytest.importorskip("websockets", reason="the extra `openenv` is not installed")

SERVER = """
import sys
from uuid import uuid4
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Said(Action):
    message: str

class Heard(Observation):
    text: str

class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self.number = 0
    def reset(self, seed=None, **rest):
        self.number = seed or 0
        return Heard(text=f"Count on from {self.number}.", reward=0.0, done=False)
    def step(self, action, **rest):
        self.number += 1
        right = action.message == str(self.number)
        return Heard(text="yes" if right else "no", reward=float(right), done=not right)
    @property
    def state(self):
        return State(episode_id="x", step_count=0)

app = create_fastapi_app(Counting, Said, Heard, max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


def episodes(tokenizer, url: str, seeds: list[int], **fields):
    own = {"url": url, "action": "message", "observation": "text", **fields}
    environment = {"kind": "openenv", "arguments": own, "timeout_seconds": 5}
    section = settings(tools=[], environment=environment, max_turns=9)
    n = len(seeds)
    rows = [{"seed": seed} for seed in seeds]
    prompts = Prompts([""] * n, [[]] * n, rows, [0] * n, [""] * n, [None] * n)
    source = build_episode_source(section, vocabulary(tokenizer), DataSection(train="environment"))
    return source.episodes(prompts)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.long
def test_episodes_on_a_real_server_are_those_of_the_package(tmp_path, byte_tokenizer):
    python = os.environ.get("TETHER_OPENENV_PYTHON")
    if python is None:
        pytest.skip("TETHER_OPENENV_PYTHON does not name a Python with openenv-core")
    (tmp_path / "server.py").write_text(SERVER)
    port = free_port()
    with subprocess.Popen([python, str(tmp_path / "server.py"), str(port)]) as server:
        try:
            for _ in range(600):
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            rows = episodes(byte_tokenizer, f"http://127.0.0.1:{port}", [4, 8])
            for row, seed in zip(rows, (4, 8), strict=True):
                prompt = byte_tokenizer.decode(row.prompt_ids)
                assert prompt == f"<|user|>Count on from {seed}.<|assistant|>", row.calls
                assert say(row, f"{seed + 1}<|end|>") == "<|user|>yes<|assistant|>"
            for row in rows:
                assert say(row, "x<|end|>") is None
                assert row.turn_rewards == (1.0, 0.0)
            close_all(rows)
            assert all(call.error is None for row in rows for call in row.calls)
        finally:
            server.kill()


@pytest.fixture
def liar():
    """A server of the protocol that answers each step with the next of `answers`."""
    server = pytest.importorskip("websockets.sync.server")
    answers: list[str] = []

    def serve(connection) -> None:
        for message in connection:
            if json.loads(message)["type"] == "close":
                return
            connection.send(answers.pop(0))

    with server.serve(serve, "127.0.0.1", 0) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.socket.getsockname()[1]}", answers
        listening.shutdown()


FINE = json.dumps({"type": "observation", "data": {"observation": {"text": "go"}, "done": False}})


@table(
    ("answer", "why"),
    [
        ("no JSON", "has no observation.text"),
        ("[]", "has no observation.text"),
        (json.dumps({"type": "observation", "data": {"observation": {}}}), "no observation.text"),
        (json.dumps({"type": "error", "data": {"message": "bad move"}}), "refuses: bad move"),
        (FINE.replace('"done": false', '"reward": "x", "done": false'), "the reward is str"),
    ],
)
def test_a_server_that_answers_wrongly_costs_its_row(liar, byte_tokenizer, answer, why):
    url, answers = liar
    answers[:] = [FINE, answer, FINE]
    [row] = episodes(byte_tokenizer, url, [1])
    assert "The call of step failed." in say(row, "x<|end|>")
    assert why in row.calls[0].error
    assert row.turn_rewards == ()
    close_all([row])


def test_a_server_that_is_gone_costs_its_rows(byte_tokenizer):
    [row] = episodes(byte_tokenizer, f"http://127.0.0.1:{free_port()}", [1])
    assert row.calls[0].name == "reset"
    assert "refused" in row.calls[0].error.lower()


@table(
    ("arguments", "why"),
    [
        ({"url": "h:1"}, "write http://HOST:PORT"),
        ({"url": "http://me:secret@h"}, "leave them out"),
        ({"url": "http://h", "action": None}, "action is missing"),
    ],
)
def test_arguments_that_name_no_server_are_refused(byte_tokenizer, arguments, why):
    given = {"url": "http://h", **arguments}
    with pytest.raises(UserError) as refused:
        episodes(byte_tokenizer, given.pop("url"), [1], **given)
    assert why in str(refused.value)
