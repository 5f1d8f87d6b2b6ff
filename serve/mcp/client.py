"""A connection to one tool server, through the SDK of the protocol, which is an extra."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from typing import Any

from pydantic import ValidationError

from llmjax.errors import ConfigError
from llmjax.serve.mcp.config import ToolServerConfig
from llmjax.serve.mcp.listing import Tool, chosen_tools, listed_tools
from llmjax.serve.mcp.results import CONNECTION_CLOSED, TIMED_OUT, CallResult, cut_to, refused, tool_failed
from llmjax.serve.protocol.chat import unread_part

log = logging.getLogger("serve")

CONNECT_SECONDS = 30.0


def check_sdk() -> None:
    """Raises ``ConfigError`` unless the SDK is installed."""
    try:
        from mcp import Client  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"mcp_config needs the SDK of MCP ({error})", hint="pip install 'llmjax[mcp]'") from None


class _Connection:
    """One connection, in a task of its own, for the SDK's is left by the task that entered it."""

    def __init__(self, config: ToolServerConfig) -> None:
        self._config = config
        self._end = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._client.add_done_callback(asyncio.Future.exception)  # an error that nobody waits for is not reported
        self.calls = 0  # that are running
        self.task = asyncio.create_task(self._hold())

    async def client(self) -> Any:
        """The SDK's client; raises what went wrong."""
        return await asyncio.shield(self._client)

    def end(self) -> None:
        self._end.set()
        if not self._client.done():  # it does not get there
            self.task.cancel()

    async def _hold(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                client = await self._connect(stack)
                self._client.set_result(client)
                await self._end.wait()
        except asyncio.CancelledError:
            if not self._client.done():
                self._client.set_exception(ConnectionError("the connection was given up"))
        except Exception as error:
            if self._client.done():  # it was in use
                log.debug("the tool server %s has ended: %s", self._config.name, _reason(error))
            else:
                self._client.set_exception(error)

    async def _connect(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters

        config = self._config
        if config.url is None:
            parameters = StdioServerParameters(
                command=config.command, args=list(config.args), env=dict(config.env), cwd=config.cwd
            )
            return await stack.enter_async_context(Client(parameters))
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        http = await stack.enter_async_context(httpx2.AsyncClient(headers=dict(config.headers), timeout=None))
        return await stack.enter_async_context(Client(streamable_http_client(config.url, http_client=http)))


class ToolServer:
    """A tool server that is named in the configuration. One that dies, or hangs in a call, is started or connected to
    anew for the next call.

    Args:
        timeout: seconds that a call may take.
        max_result_bytes: bytes of a result; the rest is cut, with a note.
    """

    def __init__(self, config: ToolServerConfig, *, timeout: float, max_result_bytes: int) -> None:
        self.config = config
        self.tools: tuple[Tool, ...] = ()  # those that are allowed; known once it has started
        self._timeout = timeout
        self._max_result_bytes = max_result_bytes
        self._connection: _Connection | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Connects, and learns which tools there are.

        Raises:
            ConfigError: it cannot be started or reached, or has no tool of an allowed name.
        """
        where = f"mcp_config: the tool server {self.config.name!r}"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                found = await listed_tools(await self._connected().client())
        except TimeoutError:
            raise ConfigError(f"{where} has not answered for {CONNECT_SECONDS:g} s") from None
        except Exception as error:
            raise ConfigError(f"{where} cannot be reached: {_reason(error)}") from None
        self.tools = chosen_tools(found, self.config.allowed_tools, where=where)

    async def call(self, name: str, arguments: dict[str, Any], *, deadline: float | None = None) -> CallResult:
        """Calls a tool; whatever goes wrong is in the result.

        Args:
            name: one of the tools.
            arguments: what it is called with.
            deadline: when nobody waits for it any more, on the event loop's clock.
        """
        if self._closed:
            return refused(CONNECTION_CLOSED, "the server ends")
        connection = self._connected()
        connection.calls += 1
        try:
            async with asyncio.timeout_at(deadline):
                async with asyncio.timeout(CONNECT_SECONDS):
                    client = await connection.client()
                async with asyncio.timeout(self._timeout):
                    found = await client.call_tool(name, arguments)
        except TimeoutError:
            if connection.calls == 1:  # nobody else waits for it
                self._drop(connection)
            return refused(TIMED_OUT, "the tool has not answered in time (--mcp-call-timeout, --mcp-loop-timeout)")
        except Exception as error:
            code = getattr(error, "code", CONNECTION_CLOSED)  # the SDK's errors have that of the message
            if code == CONNECTION_CLOSED:
                self._drop(connection)
            return refused(code, cut_to(_reason(error), most=self._max_result_bytes))
        finally:
            connection.calls -= 1
        text = cut_to(_text(found), most=self._max_result_bytes)
        return tool_failed(text) if found.is_error else CallResult(output=text)

    async def close(self) -> None:
        """Ends the connection, and the process if it is one."""
        self._closed = True
        if self._connection is not None:
            self._drop(self._connection)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _connected(self) -> _Connection:
        if self._connection is None or self._connection.task.done():
            self._connection = _Connection(self.config)
            self._tasks.add(self._connection.task)
            self._connection.task.add_done_callback(self._tasks.discard)
        return self._connection

    def _drop(self, connection: _Connection) -> None:
        connection.end()
        if self._connection is connection:
            self._connection = None


def _text(result: Any) -> str:
    """What a result says, with notes in place of pictures and the like; JSON where it says nothing in words."""
    texts = [part.text if part.type == "text" else unread_part(part.type) for part in result.content]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False, separators=(",", ":"))
    return "\n".join(texts)


def _reason(error: BaseException) -> str:
    """What an error says; of a group of them the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"its answer is not one of the protocol: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(getattr(error, "message", None) or error) or type(error).__name__
