"""All tool servers of the configuration: started together, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from llmjax.config import ServerConfig
from llmjax.serve.mcp.client import ToolServer, check_sdk
from llmjax.serve.mcp.config import read_config


class ToolServers:
    """Tool servers by name.

    Args:
        servers: those of the configuration.
    """

    def __init__(self, servers: Mapping[str, ToolServer]) -> None:
        self._servers = servers

    @classmethod
    def of(cls, config: ServerConfig) -> ToolServers:
        """The tool servers that ``--mcp-config`` names, before they are started.

        Raises:
            ConfigError: the file is wrong, or the SDK is not installed.
        """
        if config.mcp_config is None:
            return cls({})
        check_sdk()
        timeout, most = config.mcp_call_timeout, config.mcp_max_result_bytes
        servers = read_config(Path(config.mcp_config).expanduser())
        return cls({one.name: ToolServer(one, timeout=timeout, max_result_bytes=most) for one in servers})

    def __bool__(self) -> bool:
        return bool(self._servers)

    @property
    def names(self) -> list[str]:
        return list(self._servers)

    @property
    def all(self) -> list[ToolServer]:
        return list(self._servers.values())

    def get(self, name: str) -> ToolServer | None:
        return self._servers.get(name)

    async def start(self) -> None:
        """Starts or connects to all of them; raises ``ConfigError``, with none left running, if one fails."""
        try:
            async with asyncio.TaskGroup() as group:
                for server in self._servers.values():
                    group.create_task(server.start())
        except BaseExceptionGroup as failed:
            await self.close()
            raise failed.exceptions[0] from None

    async def close(self) -> None:
        """Ends them."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))
