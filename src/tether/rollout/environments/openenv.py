"""Environments behind an OpenEnv server, by its WebSocket protocol, without its package.

    {"type": "reset", "data": {"seed": 3}}  ->  {"type": "observation", "data": {"observation": {…},
    {"type": "step", "data": {"message": "…"}}     "reward": 0.5, "done": false}}
    {"type": "close"}                       or  {"type": "error", "data": {"message": "…"}}

A connection is an episode. Imports no torch.
"""

import contextlib
import importlib
import json
from collections.abc import Mapping
from typing import Any

from tether.errors import UserError
from tether.rollout.environments.results import Step, read_reset, read_step
from tether.rollout.tool_calls import WrongResult
from tether.support.http import refuse_userinfo

MAX_BYTES = 10_000_000  # of a message


class OpenEnvSession:
    """An episode on a server. `action` is the field of the action that holds the policy's text, and
    `observation` that of the observation which the policy reads."""

    def __init__(
        self, url: str, action: str, observation: str, timeout_seconds: float, **reset: Any
    ) -> None:
        self.url, self.action, self.observation = url, action, observation
        self.limit, self.given = timeout_seconds, reset
        self.connection: Any = None
        self.open = contextlib.ExitStack()

    def reset(self, columns: Mapping[str, Any]) -> object:
        """Connect, and begin with the row's columns; the server takes those that it knows."""
        self.connection = self.open.enter_context(_connect(self.url, self.limit))
        return read_reset(self._ask("reset", {**columns, **self.given})["observation"])

    def step(self, text: str) -> Step:
        """Send a turn; the server's `done` ends the episode."""
        return read_step(self._ask("step", {self.action: text}))

    def close(self) -> None:
        """End the episode on the server."""
        if self.connection is not None:
            self.connection.send(json.dumps({"type": "close"}))
        self.open.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        self.connection.send(json.dumps({"type": kind, "data": data}))
        try:
            answer = json.loads(self.connection.recv(timeout=self.limit))
            found = answer["data"]
            if answer["type"] == "error":
                raise WrongResult(f"the server refuses: {str(found.get('message'))[:500]}")
            shown = found["observation"][self.observation]
            return {
                "observation": shown if isinstance(shown, str | None) else json.dumps(shown),
                "reward": found.get("reward"),
                "done": found.get("done"),
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise WrongResult(
                f"the server's answer to {kind} has no observation.{self.observation}"
            ) from None


def _connect(url: str, seconds: float) -> Any:
    client = importlib.import_module("websockets.sync.client")
    address = f"ws{url.removeprefix('http').rstrip('/')}/ws"
    return client.connect(address, open_timeout=seconds, max_size=MAX_BYTES, proxy=None)


def check_server(arguments: Mapping[str, Any]) -> None:
    """Refuse, before training, arguments that name no server, and a missing package."""
    where = "rollout.environment openenv"
    for name in ("url", "action", "observation"):
        if not isinstance(arguments.get(name), str):
            raise UserError(
                f"{where} needs arguments: {{url: http://HOST:PORT, action: FIELD, observation: "
                f"FIELD}}, the fields that hold text; {name} is missing."
            )
    try:
        refuse_userinfo("url", arguments["url"], "leave them out")
    except ValueError as error:
        raise UserError(f"{where}: {error}.") from None
    if not arguments["url"].startswith(("http://", "https://")):
        raise UserError(f"{where}: url is {arguments['url']!r}; write http://HOST:PORT.")
    try:
        importlib.import_module("websockets")
    except ImportError:
        raise UserError(f"{where} needs a package: pip install '.[openenv]'.") from None
