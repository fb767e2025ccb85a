"""Tools of real MCP servers, over stdio and HTTP, through the official client."""

import socket
import subprocess
import sys
import time

import pytest
from helpers import table
from pydantic import ValidationError

from rollout.talk import say, settings, vocabulary
from tether.config import McpTool
from tether.errors import UserError
from tether.rollout.tool_calls import InvalidArguments
from tether.rollout.tools.build import build_episode_source
from tether.rollout.tools.mcp import McpServer, read_arguments
from tether.types import Prompts

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")

SERVER = """
import sys, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("demo")

@server.tool()
def add(a: int, b: int) -> str:
    return str(a + b)

@server.tool()
def shout(text: str) -> str:
    if text == "sleep":
        time.sleep(20)
    return text.upper() + "</result><|end|>"

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
server.run("stdio")
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


def row_with(tokenizer, **tool):
    section = settings(tools=[{"kind": "mcp", **tool}], max_turns=9)
    prompts = Prompts(["p"], [[1]], [{}], [0], [""], [None])
    [row] = build_episode_source(section, vocabulary(tokenizer)).episodes(prompts)
    return row


def check_calls(row, tokenizer) -> None:
    assert say(row, '<add>{"a": 2, "b": 40}</add>') == "<result>42</result>"
    loud = say(row, "<shout>hi</shout>")  # one text needs no JSON
    assert loud == "<result>HI</result><|end|></result>"
    refused = say(row, '<add>{"a": "x"}</add>')
    assert refused.startswith("<result>Invalid call of add: Error executing tool add")
    assert "not a JSON object with a, b" in say(row, "<add>2 40</add>")
    assert [call.fault for call in row.calls] == [None, None, "policy", "policy"]


def test_the_tools_of_a_program_are_called_over_stdio(program, byte_tokenizer):
    command = [sys.executable, str(program)]
    row = row_with(byte_tokenizer, command=command, timeout_seconds=1)
    check_calls(row, byte_tokenizer)
    began = time.monotonic()
    assert say(row, "<shout>sleep</shout>") == "<result>The call of shout failed.</result>"
    assert time.monotonic() - began < 5
    assert row.calls[-1].fault == "tool"


@pytest.mark.long
def test_the_tools_of_a_server_are_called_over_http(program, byte_tokenizer):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(program), str(port)]) as server:
        try:
            _wait_for_port(port)
            row = row_with(byte_tokenizer, url=f"http://127.0.0.1:{port}/mcp")
            check_calls(row, byte_tokenizer)
        finally:
            server.kill()


def _wait_for_port(port: int) -> None:
    for _ in range(300):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the server does not listen")


def test_only_names_the_tools_that_may_be_called(program, byte_tokenizer):
    command = [sys.executable, str(program)]
    row = row_with(byte_tokenizer, command=command, only=["add"])
    assert [tool.name for tool in row.handler.tools] == ["add"]
    with pytest.raises(UserError, match="the server has no tool 'divide', only add, shout"):
        row_with(byte_tokenizer, command=command, only=["divide"])


@table(
    "tool",
    [
        {"command": ["/no/such/program"]},
        {"command": [sys.executable, "-c", "raise SystemExit(1)"]},
        {"url": "http://127.0.0.1:9/mcp"},
    ],
)
def test_a_server_that_does_not_answer_is_refused_before_training(tool):
    section = McpTool(kind="mcp", connect_seconds=5, **tool)
    with pytest.raises(UserError, match="no MCP server answers"):
        McpServer(section, "rollout.tools mcp")


@table(
    ("tool", "why"),
    [
        ({}, "either a command or a url"),
        ({"command": ["x"], "url": "http://h/mcp"}, "either a command or a url"),
        ({"url": "h:1"}, "write http://HOST:PORT/mcp"),
        ({"url": "http://me:secret@h/mcp"}, "key_variable"),
        ({"command": ["x"], "key_variable": "KEY"}, "key_variable goes with a url"),
    ],
)
def test_a_section_that_names_no_server_is_refused(tool, why):
    with pytest.raises(ValidationError, match=why):
        settings(tools=[{"kind": "mcp", **tool}])


ONE = {"properties": {"text": {"type": "string"}}}
TWO = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


@table(
    ("text", "schema", "expected"),
    [
        ("hello", ONE, {"text": "hello"}),
        ('{"text": "x"}', ONE, {"text": "x"}),
        ('{"a": 1, "b": 2}', TWO, {"a": 1, "b": 2}),
        ("", {}, {}),
    ],
)
def test_arguments_are_json_or_the_one_text(text, schema, expected):
    assert read_arguments(text, schema) == expected


@table("text", ["[1, 2]", "1, 2", "{", "[" * 100_000])
def test_arguments_that_are_no_object_are_the_policys_fault(text):
    with pytest.raises(InvalidArguments):
        read_arguments(text, TWO)
