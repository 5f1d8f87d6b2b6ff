"""A server of the benchmark's own: started for the run, stopped after it."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmjax.bench.client import OpenAIClient, RequestFailed
from llmjax.config import EngineConfig
from llmjax.errors import LLMJaxError, last_error

STOP_SECONDS = 15.0


class ServerFailed(LLMJaxError):
    """The server of a benchmark did not start."""


@dataclass(frozen=True)
class OwnServer:
    """Where it is, and its process."""

    url: str
    pid: int


@asynccontextmanager
async def own_server(config: EngineConfig, *, seconds: float) -> AsyncIterator[OwnServer]:
    """Runs ``python -m serve`` in a process of its own, on a free port of this machine.

    Args:
        seconds: how long it may take to be ready.

    Yields:
        The server, once it is ready.

    Raises:
        ServerFailed: it ends before, or is not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="llmjax-bench-") as folder:
        settings, log = Path(folder) / "server.yaml", Path(folder) / "server.log"
        port = _free_port()
        server = {"host": "127.0.0.1", "port": port, "access_log": False}
        settings.write_text(yaml.safe_dump({**changed_settings(config), **server}), encoding="utf-8")
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "llmjax.serve", "--config", str(settings), stdout=output, stderr=output
            )
        try:
            url = f"http://127.0.0.1:{port}"
            await _wait_for_start(process, url, log, seconds=seconds)
            yield OwnServer(url, process.pid)
        finally:
            await _stop(process)


async def wait_until_ready(client: OpenAIClient, *, seconds: float) -> None:
    """Waits until /health answers with success.

    Raises:
        ServerFailed: it does not within that time.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            await client.get("/health")
            return
        except RequestFailed as error:
            if time.monotonic() >= deadline:
                raise ServerFailed(f"the server is not ready after {seconds:g} s: {error}") from None
        await asyncio.sleep(0.2)


def changed_settings(config: EngineConfig) -> dict[str, Any]:
    """The settings that differ from their defaults, as a YAML file holds them."""
    default = dataclasses.asdict(EngineConfig())
    return {name: value for name, value in dataclasses.asdict(config).items() if value != default[name]}


async def _wait_for_start(process: asyncio.subprocess.Process, url: str, log: Path, *, seconds: float) -> None:
    """Returns when the server is ready; one that dies before says why in the last line of its log."""
    client = OpenAIClient(url)
    ready = asyncio.ensure_future(wait_until_ready(client, seconds=seconds))
    dead = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({ready, dead}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            reason, hint = last_error(log.read_text(encoding="utf-8", errors="replace"), process.returncode)
            raise ServerFailed(f"the server did not start: {reason}", hint=hint)
        ready.result()
    finally:
        for task in (ready, dead):
            task.cancel()
        await asyncio.gather(ready, dead, return_exceptions=True)
        await client.close()


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
