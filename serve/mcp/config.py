"""The file of ``--mcp-config``: which tool servers there are, and which of their tools may be called."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmjax.errors import ConfigError
from llmjax.text_file import read_text

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_SERVERS = 64
STDIO = frozenset({"command", "args", "env", "cwd"})
HTTP = frozenset({"url", "headers"})
TRANSPORTS = {"stdio": STDIO, "http": HTTP, "streamable-http": HTTP, "streamableHttp": HTTP}


@dataclass(frozen=True, kw_only=True)
class ToolServerConfig:
    """One tool server: a process that is started, or an address.

    Args:
        name: what requests call it.
        allowed_tools: names of the tools that may be called.
        command: the program of a process that speaks over its standard input and output; None: it is at ``url``.
        args: the program's arguments.
        env: its environment variables, besides HOME, PATH and the like.
        cwd: its folder.
        url: where a server answers over streamable HTTP.
        headers: headers of requests to it.
    """

    name: str
    allowed_tools: tuple[str, ...]
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def read_config(path: Path) -> tuple[ToolServerConfig, ...]:
    """The tool servers of a file, in its order.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or says something that is not known.
    """
    try:
        whole = json.loads(read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from None
    if not isinstance(whole, dict) or not isinstance(servers := whole.get("mcpServers"), dict):
        raise ConfigError(f'{path}: must be an object with "mcpServers", an object of tool servers by name')
    if unknown := sorted(whole.keys() - {"mcpServers"}):
        raise ConfigError(f"{path}: {unknown[0]!r} is not known; only mcpServers is")
    if len(servers) > MAX_SERVERS:
        raise ConfigError(f"{path}: mcpServers: there are more than {MAX_SERVERS}")
    return tuple(_server(name, fields, f"{path}: mcpServers.{name}") for name, fields in servers.items())


def _server(name: str, fields: Any, where: str) -> ToolServerConfig:
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has up to 64 letters, digits, dots, dashes and underscores")
    if not isinstance(fields, dict) or ("command" in fields) == ("url" in fields):
        raise ConfigError(f"{where}: must be an object with either `command` or `url`")
    own = STDIO if "command" in fields else HTTP
    transport = fields.get("type", "stdio" if own is STDIO else "http")
    if not isinstance(transport, str) or TRANSPORTS.get(transport) is not own:
        wanted = "stdio" if own is STDIO else "http"
        raise ConfigError(f"{where}.type: must be {wanted!r}, or left out", hint="SSE alone is not supported")
    if unknown := sorted(fields.keys() - own - {"type", "allowedTools"}):
        raise ConfigError(f"{where}.{unknown[0]}: is not known here; known are {', '.join(sorted(own))}, allowedTools")
    allowed = _texts(fields, "allowedTools", where)
    if not allowed:
        raise ConfigError(f"{where}.allowedTools: must list the names of the tools that may be called")
    return ToolServerConfig(
        name=name,
        allowed_tools=allowed,
        command=_text(fields, "command", where),
        args=_texts(fields, "args", where),
        env=_map(fields, "env", where),
        cwd=_text(fields, "cwd", where),
        url=_text(fields, "url", where),
        headers=_map(fields, "headers", where),
    )


def _text(fields: Mapping[str, Any], name: str, where: str) -> str | None:
    value = fields.get(name)
    if name in fields and (not isinstance(value, str) or not value):
        raise ConfigError(f"{where}.{name}: must be a text")
    return value


def _texts(fields: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = fields.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{where}.{name}: must be a list of texts")
    return tuple(value)


def _map(fields: Mapping[str, Any], name: str, where: str) -> dict[str, str]:
    value = fields.get(name, {})
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise ConfigError(f"{where}.{name}: must be an object of texts")
    return value
