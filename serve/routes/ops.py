"""Endpoints for operators and probes."""

from __future__ import annotations

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from llmjax.serve.context import server_of
from llmjax.serve.errors import retry_later
from llmjax.version import __version__


async def health(request: Request) -> Response:
    """200 while the engine loop turns; 503 when it is dead, stuck, or the server is stopping."""
    server = server_of(request)
    if server.gate.closed:
        raise retry_later("the server is shutting down", seconds=1, code="shutting_down")
    server.engine.check_health()
    return Response()


async def version(_: Request) -> Response:
    return Response(orjson.dumps({"version": __version__}), media_type="application/json")


async def hint(request: Request) -> Response:
    model = server_of(request).engine.info.model_name
    return PlainTextResponse(f"llmjax {__version__} serves {model} with OpenAI's API under /v1\n")


def ops_routes(collectors: CollectorRegistry) -> list[Route]:
    async def metrics(_: Request) -> Response:
        return Response(generate_latest(collectors), headers={"content-type": CONTENT_TYPE_LATEST})

    return [
        Route("/", hint, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
