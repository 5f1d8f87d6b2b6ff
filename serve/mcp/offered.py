"""Responses' ``mcp`` tools: which tools of which servers a request offers its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmjax.serve.errors import ApiError, cut
from llmjax.serve.mcp.client import ToolServer
from llmjax.serve.mcp.listing import Tool
from llmjax.serve.mcp.servers import ToolServers
from llmjax.serve.responses.conversation import flat_name

# Fields that say which server is meant, or how to get in: the operator does.
OF_THE_OPERATOR = ("server_url", "connector_id", "tunnel_id", "headers", "authorization")
KNOWN = frozenset({"type", "server_label", "server_description", "allowed_tools", "require_approval"})


@dataclass(frozen=True, kw_only=True)
class Offered:
    """A tool that a model may call, and its server.

    Args:
        needs_approval: whether the client is asked before each call.
    """

    server: ToolServer
    tool: Tool
    needs_approval: bool

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
    tools = {one.name: one for one in server.tools}
    allowed = tool.get("allowed_tools")
    offered = server.tools if allowed is None else _named(allowed, tools, f"{path}.allowed_tools")
    asking = _asking(tool.get("require_approval"), tools, f"{path}.require_approval")
    return [Offered(server=server, tool=one, needs_approval=one.name in asking) for one in offered]


def _named(wanted: Any, tools: Mapping[str, Tool], path: str) -> list[Tool]:
    """The tools that a list of names, or OpenAI's filter, lets through."""
    if isinstance(wanted, list):
        wanted = {"tool_names": wanted}
    if not isinstance(wanted, dict) or not wanted.keys() <= {"tool_names", "read_only"}:
        raise _refusal(path, "must be a list of names, or an object with tool_names and read_only", "invalid_type")
    names, read_only = wanted.get("tool_names"), wanted.get("read_only")
    if names is None:
        names = list(tools)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _refusal(f"{path}.tool_names", "must be a list of names", "invalid_type")
    if not isinstance(read_only, bool | None):
        raise _refusal(f"{path}.read_only", "must be true or false", "invalid_type")
    if missing := [name for name in names if name not in tools]:
        said = f"names {cut(missing[0])!r}, which is not allowed here; allowed are {', '.join(tools) or 'none'}"
        raise _refusal(path, said, "invalid_value")
    found = [tools[name] for name in dict.fromkeys(names)]
    return [one for one in found if read_only is None or one.read_only == read_only]


def _asking(wanted: Any, tools: Mapping[str, Tool], path: str) -> frozenset[str]:
    """Names of the tools whose calls need approval: all, where a request does not say otherwise."""
    if wanted in (None, "always"):
        return frozenset(tools)
    if wanted == "never":
        return frozenset()
    if not isinstance(wanted, dict) or not wanted.keys() <= {"always", "never"}:
        raise _refusal(path, 'must be "always", "never", or an object of the two with names of tools', "invalid_value")
    always, never = (
        {one.name for one in _named(wanted[each], tools, f"{path}.{each}")} if wanted.get(each) is not None else set()
        for each in ("always", "never")
    )
    return frozenset(tools) - (never - always)


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
