"""A tool server: ``python tool_server.py [http]``. Over HTTP its first line says where it is."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import anyio
import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

server = MCPServer("tiny", log_level="CRITICAL")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


@server.tool()
def long(n: int) -> str:
    return "é" * n


@server.tool()
def recalls(topic: str) -> str:
    """What is known of a topic."""
    return f"It is known: [[{topic}]]"


@server.tool()
def broken() -> str:
    raise ToolError("no such file")


@server.tool()
def dies() -> str:
    os._exit(3)


@server.tool()
async def hangs() -> str:
    time.sleep(3600)  # nothing else is answered either
    return ""


@server.tool()
async def waits(seconds: float) -> str:
    """Waits, and leaves a note beside its program when it is called and when the caller has lost patience."""
    note("waits")
    try:
        await anyio.sleep(seconds)
    except anyio.get_cancelled_exc_class():
        note("canceled")
        raise
    return "waited"


def note(word: str) -> None:
    with Path(f"{sys.argv[1]}.notes").open("a") as notes:
        notes.write(f"{word}\n")


@server.tool()
def secret() -> str:
    return "not allowed"


def main(argv: list[str]) -> None:
    if "http" not in argv:
        with Path(argv[0]).open("a") as pids:
            pids.write(f"{os.getpid()}\n")
        server.run("stdio")
        return
    sock = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{sock.getsockname()[1]}/mcp", flush=True)
    app = server.streamable_http_app()
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[sock])


if __name__ == "__main__":
    main(sys.argv[1:])
