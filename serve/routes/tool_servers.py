"""GET /v1/tool_servers: the tools that a request may have this server call."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.serve.context import shared_of


async def list_tool_servers(request: Request) -> Response:
    """The tool servers of --mcp-config, each with the tools that may be called."""
    found = [
        {
            "object": "tool_server",
            "server_label": server.config.name,
            "tools": [tool.listed() for tool in server.tools],
        }
        for server in shared_of(request).tool_servers.all
    ]
    return Response(orjson.dumps({"object": "list", "data": found}), media_type="application/json")


TOOL_SERVER_ROUTES = [Route("/v1/tool_servers", list_tool_servers, methods=["GET"])]
