"""Responses' ``mcp`` tools: which tools of which servers a request offers its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmjax.serve.errors import ApiError, cut
from llmjax.serve.mcp.client import Tool, ToolServer
from llmjax.serve.mcp.servers import ToolServers
from llmjax.serve.responses.conversation import flat_name

# Fields that say which server is meant, or how to get in: the operator does.
OF_THE_OPERATOR = ("server_url", "connector_id", "tunnel_id", "headers", "authorization")
KNOWN = frozenset({"type", "server_label", "server_description", "allowed_tools", "require_approval"})


@dataclass(frozen=True, kw_only=True)
class Offered:
    """A tool that a model may call, and its server."""

    server: ToolServer
    tool: Tool

    @property
    def label(self) -> str:
        return self.server.config.name

    @property
    def called(self) -> str:
        """What the model calls it."""
        return flat_name(self.label, self.tool.name)

    def function(self) -> dict[str, Any]:
        """The function that it is to the model."""
        described = {} if self.tool.description is None else {"description": self.tool.description}
        return {"type": "function", "function": {"name": self.called, **described, "parameters": self.tool.schema}}

    def listed(self) -> dict[str, Any]:
        """The tool as ``mcp_list_tools`` items have it."""
        tool = self.tool
        return {
            "name": tool.name,
            "description": tool.description,
            "input_schema": tool.schema,
            "annotations": tool.annotations,
        }


def offered_by(tool: Mapping[str, Any], path: str, servers: ToolServers) -> list[Offered]:
    """What one ``mcp`` tool of a request offers.

    Args:
        tool: the tool of the request.
        path: where it stands there.
        servers: those of the configuration.

    Raises:
        ApiError: it names no server of the configuration, a tool that is not allowed, or wants something that is not
            supported.
    """
    for name in OF_THE_OPERATOR:
        if tool.get(name) is not None:
            raise _refusal(f"{path}.{name}", "is refused: the server's operator names tool servers (--mcp-config)")
    for name in sorted(tool.keys() - KNOWN):
        if tool[name] is not None:
            raise _refusal(f"{path}.{cut(name)}", "is not supported")
    label = tool.get("server_label")
    server = servers.get(label) if isinstance(label, str) else None
    if server is None:
        known = f"it has {', '.join(servers.names)}" if servers else "it has none (--mcp-config)"
        raise _refusal(f"{path}.server_label", f"must name a tool server of this server; {known}", "invalid_value")
    if tool.get("require_approval") != "never":
        raise _refusal(f"{path}.require_approval", 'must be "never": calls are not submitted for approval')
    allowed = tool.get("allowed_tools")
    if isinstance(allowed, dict) and allowed.keys() == {"tool_names"}:
        allowed = allowed["tool_names"]
    tools = {one.name: one for one in server.tools}
    if allowed is None:
        allowed = list(tools)
    if not isinstance(allowed, list) or not all(isinstance(name, str) for name in allowed):
        raise _refusal(f"{path}.allowed_tools", "must be a list of names", "invalid_type")
    if missing := [name for name in allowed if name not in tools]:
        said = f"{cut(missing[0])!r} is not allowed at {label!r}; allowed are {', '.join(tools) or 'none'}"
        raise _refusal(f"{path}.allowed_tools", said, "invalid_value")
    return [Offered(server=server, tool=tools[name]) for name in dict.fromkeys(allowed)]


def all_offered(tools: list[dict[str, Any]] | None, servers: ToolServers) -> dict[str, Offered]:
    """What all tools of a request offer, by what the model calls it; raises ``ApiError`` like `offered_by`."""
    found = [
        one
        for i, tool in enumerate(tools or [])
        if tool.get("type") == "mcp"
        for one in offered_by(tool, f"tools.{i}", servers)
    ]
    return {one.called: one for one in found}


def _refusal(path: str, said: str, code: str = "unsupported_parameter") -> ApiError:
    return ApiError(f"`{path}` {said}", param=path, code=code)
