"""The HTTP server, and an orderly end of it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from functools import partial
from types import FrameType
from typing import cast

import uvicorn
from starlette.applications import Starlette

from llmjax.config import ServerConfig
from llmjax.errors import ChatTemplateError
from llmjax.serve.connection import BoundedConnection, IdleConnections
from llmjax.serve.drain import Gate
from llmjax.serve.listen import base_url, first_pull, first_request
from llmjax.serve.mcp.servers import ToolServers
from llmjax.serve.models import Models
from llmjax.serve.pulls import Pulls

log = logging.getLogger("serve")

LAST_WORDS_SECONDS = 2.0  # of shutdown_timeout, at most, for error events of requests that did not finish in time
DEAD_SECONDS = 10.0  # that a server without an engine says so at /health, before it ends
LATE_SECONDS = 2.0  # after shutdown_timeout the process ends, whatever it is doing


class DrainingServer(uvicorn.Server):
    """Uvicorn, but a signal first closes the gate and lets running requests finish; a second one ends at once. So does
    the clock, soon after ``shutdown_timeout``."""

    def __init__(self, app: Starlette, config: ServerConfig, *, sock: socket.socket) -> None:
        self._models: Models = app.state.models
        self._pulls: Pulls | None = app.state.pulls
        self._settings = config
        self._gate: Gate = app.state.shared.gate
        self._engine_stopped = False
        self._loop = asyncio.get_running_loop()
        self._drain_task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._url = base_url(config, sock)
        self._last_words = min(LAST_WORDS_SECONDS, config.shutdown_timeout / 4)
        connection = partial(BoundedConnection, settings=config, idle=IdleConnections(config.max_idle_connections))
        self._tool_servers: ToolServers = app.state.shared.tool_servers
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                root_path=config.root_path.rstrip("/"),
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                http=cast(type[asyncio.Protocol], connection),
                timeout_keep_alive=cast(int, config.keep_alive_timeout),
                timeout_graceful_shutdown=1,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._check_chat_templates()
        await self._tool_servers.start()
        await super().startup(sockets=sockets)
        self._watch_task = asyncio.create_task(self._watch_engine())
        entries = self._models.entries
        names = ", ".join(entry.name for entry in entries) or "models that are pulled"
        print(f"{names} {'is' if len(entries) == 1 else 'are'} served at {self._url}/v1", flush=True)
        if not entries:
            print(f"pull one: {first_pull(self._url, self._settings)}", flush=True)
        elif entries[0].server is not None:
            print(f"try: {first_request(self._url, self._settings, entries[0].server.engine)}", flush=True)
        if self._settings.web and self._settings.uds is None:
            print(f"or open {self._url}/ in a browser", flush=True)

    async def _check_chat_templates(self) -> None:
        """Compiles them before the first request needs them."""
        for server in [entry.server for entry in self._models.entries if entry.server is not None]:
            tokenizer = server.engine.tokenizer
            if tokenizer is not None and tokenizer.chat_template is not None:
                try:
                    await asyncio.to_thread(tokenizer.chat_template.check)
                except ChatTemplateError as error:
                    log.warning("chats will be refused: %s", error)

    async def _watch_engine(self) -> None:
        """A server whose engine has died can only end; its supervisor may then start another."""
        status = await self._models.wait_died()
        log.error("without its engine the server ends in %g s, with status %d", DEAD_SECONDS, status)
        await asyncio.sleep(DEAD_SECONDS)
        self._start_drain("the engine is dead")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
        await super().shutdown(sockets=sockets)
        await self._tool_servers.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # From here on the system itself ends the process: nothing that holds the interpreter can keep it from doing so.
        for another in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(another, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self._settings.shutdown_timeout + LATE_SECONDS)
        # The rest on the loop: a log line that this signal came upon would not bear another one within it.
        self._loop.call_soon_threadsafe(self._start_drain, signal.Signals(sig).name)

    def _start_drain(self, why: str) -> None:
        """Once, whether a signal or the engine's end comes first."""
        if self._gate.closed:
            return
        log.info("%s: no new requests; %d are running", why, self._gate.active)
        self._gate.close()
        self._drain_task = self._loop.create_task(self._drain())

    async def stop_engine(self) -> None:
        """Aborts what still runs; the second call, after a drain that timed out, does nothing."""
        if not self._engine_stopped:
            self._engine_stopped = True
            if self._pulls is not None:
                await self._pulls.shutdown()
            await self._models.shutdown()

    async def _drain(self) -> None:
        try:
            if not await self._gate.wait_empty(timeout=self._settings.shutdown_timeout - self._last_words):
                log.warning("%d requests did not finish in time and are aborted", self._gate.active)
                async with asyncio.timeout(self._last_words):
                    await self.stop_engine()
                    await self._gate.wait_empty(timeout=self._last_words)
        except TimeoutError:
            log.warning("the engine does not answer; the server ends without it")
        finally:
            self.should_exit = True
