"""Tools of MCP servers, over stdio or HTTP, by the official client (extra `mcp`).

A server is connected to once per run, by a task that lives as long as the process; calls run beside
each other on the same event loop.
"""

import asyncio
import importlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from tether.config import McpTool
from tether.errors import UserError, describe
from tether.rollout.tool_calls import InvalidArguments
from tether.rollout.tools.functions import Function, function_schema
from tether.rollout.tools.tool import Tool
from tether.support.background_loop import wait_for
from tether.support.http import bearer, key_from_environment


class McpServer:
    """A connection to one server."""

    def __init__(self, settings: McpTool, where: str) -> None:
        self.settings = settings
        self.client: Any = None
        try:
            package = importlib.import_module("mcp")
        except ImportError:
            raise UserError(f"{where} needs the package: pip install '.[mcp]'.") from None
        try:
            wait_for(self._connect(package), settings.connect_seconds)
        except Exception as error:  # of the system, the protocol or the server
            raise UserError(f"{where}: no MCP server answers: {describe(_cause(error))}.") from None

    async def _connect(self, package: Any) -> None:
        """Start the task that holds the connection: it has to be closed where it was opened."""
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._hold(package, ready))
        self.client = await ready

    async def _hold(self, package: Any, ready: "asyncio.Future[Any]") -> None:
        try:
            async with package.Client(_transport(package, self.settings)) as client:
                ready.set_result(client)
                await asyncio.Event().wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(_cause(error))
            if isinstance(error, asyncio.CancelledError):
                raise

    def list_tools(self) -> list[Any]:
        """Return what the server offers, all pages of it."""
        return wait_for(self._list_tools(), self.settings.connect_seconds)

    async def _list_tools(self) -> list[Any]:
        found, cursor = [], None
        while True:
            page = await self.client.list_tools(cursor=cursor)
            found += page.tools
            cursor = getattr(page, "next_cursor", None)
            if not cursor:
                return found

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a tool's text; what the server calls an error is the policy's to read."""
        limit = self.settings.timeout_seconds
        result = wait_for(self.client.call_tool(name, dict(arguments)), limit)
        text = "\n".join(part.text for part in result.content if getattr(part, "text", None))
        if result.is_error:
            raise InvalidArguments(" ".join(text.split())[:500] or "the server does not say why")
        return text

    def close(self) -> None:
        """End the connection, and a server that was started for it."""
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)


def build_mcp(settings: McpTool, where: str) -> list[Tool]:
    """Return the tools of a server, or those of them that `only` names."""
    server, offered = _offered(settings, where)
    return [
        Tool(
            name,
            f"<{name}>{{}}</{name}>",
            "<result>{}</result>",
            _caller(server, name, _schema(tool)),
            settings.timeout_seconds,
        )
        for name, tool in offered.items()
    ]


def build_mcp_functions(settings: McpTool, where: str) -> list[Function]:
    """Return the same tools as functions; the server itself checks their arguments."""
    server, offered = _offered(settings, where)
    return [
        Function(
            function_schema(name, getattr(tool, "description", None) or "", _schema(tool)),
            _by_name(server, name),
            settings.timeout_seconds,
        )
        for name, tool in offered.items()
    ]


def _offered(settings: McpTool, where: str) -> tuple[McpServer, dict[str, Any]]:
    """Connect, and return the tools that the policy may call, by name."""
    server = McpServer(settings, where)
    offered = {tool.name: tool for tool in server.list_tools()}
    wanted = list(offered) if settings.only is None else settings.only
    for name in wanted:
        if name not in offered:
            raise UserError(f"{where}: the server has no tool {name!r}, only {', '.join(offered)}.")
    return server, {name: offered[name] for name in wanted}


def _by_name(server: McpServer, name: str) -> Callable[..., object]:
    return lambda **arguments: server.call(name, arguments)


def _caller(server: McpServer, name: str, schema: Mapping[str, Any]) -> Callable[[str], object]:
    return lambda text: server.call(name, read_arguments(text, schema))


def read_arguments(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call: a JSON object, or text for a tool that takes one text."""
    properties = schema.get("properties") or {}
    if len(properties) == 1 and not text.lstrip().startswith("{"):
        [(name, kind)] = properties.items()
        if kind.get("type") == "string":
            return {name: text}
    if not text.strip() and not properties:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        names = ", ".join(properties) or "nothing"
        raise InvalidArguments(f"the arguments are not a JSON object with {names}") from None
    if not isinstance(value, dict):
        raise InvalidArguments(f"the arguments are {type(value).__name__}, not a JSON object")
    return value


def _schema(tool: Any) -> Mapping[str, Any]:
    return getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None) or {}


def _transport(package: Any, settings: McpTool) -> Any:
    if settings.command is not None:
        command, *rest = settings.command
        given = {name: os.environ[name] for name in settings.variables if name in os.environ}
        server = package.StdioServerParameters(command=command, args=rest, env=given)
        stdio = importlib.import_module("mcp.client.stdio")
        return stdio.stdio_client(server, errlog=open(os.devnull, "w"))
    if settings.key_variable is None:
        return settings.url
    key = key_from_environment(settings.key_variable, "rollout.tools key_variable")
    http = importlib.import_module("mcp.client.streamable_http")
    client = importlib.import_module("httpx2").AsyncClient(headers=bearer(key, "the key"))
    return http.streamable_http_client(settings.url, http_client=client)


def _cause(error: BaseException) -> BaseException:
    """Return the first error of a group."""
    inner = getattr(error, "exceptions", ())
    return _cause(inner[0]) if inner else error
