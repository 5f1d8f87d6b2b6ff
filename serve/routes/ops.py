"""Endpoints for operators and probes."""

from __future__ import annotations

from importlib import metadata

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from llmjax.serve.context import shared_of
from llmjax.serve.errors import retry_later
from llmjax.serve.models import loaded, models_of
from llmjax.serve.shown import shown
from llmjax.version import __version__


async def health(request: Request) -> Response:
    """200 while the engine loop turns; 503 when it is dead, stuck, or the server is stopping. Of several models: 200
    unless all have failed."""
    if shared_of(request).gate.closed:
        raise retry_later("the server is shutting down", seconds=1, code="shutting_down")
    models_of(request).check_health()
    return Response()


async def version(_: Request) -> Response:
    """The version of this program."""
    return Response(orjson.dumps({"version": __version__}), media_type="application/json")


async def load(request: Request) -> Response:
    """How many requests are being answered."""
    return Response(orjson.dumps({"server_load": shared_of(request).gate.active}), media_type="application/json")


async def server_info(request: Request) -> Response:
    """The versions, the engine and the settings of this server that anybody may know."""
    entry = models_of(request).find(request.query_params.get("model"))
    server = loaded(entry)
    engine, config = server.engine, server.engine.config
    parts = {
        "speculative_config": config.speculative,
        "kv_events_config": config.kv_events,
        "kv_transfer_config": config.kv_transfer,
    }
    pooler = engine.info.pooler
    body = {
        "version": __version__,
        "jax": metadata.version("jax"),
        "model": server.model_root,
        "engine": {**shown(engine.info), "pooler": None if pooler is None else shown(pooler)},
        "settings": {
            **shown(config),
            **shown(server.config),
            **{name: None if part is None else shown(part) for name, part in parts.items()},
        },
    }
    options = orjson.OPT_NON_STR_KEYS
    return Response(orjson.dumps(body, default=sorted, option=options), media_type="application/json")


async def hint(request: Request) -> Response:
    """What this is."""
    models = ", ".join(entry.name for entry in models_of(request).entries) or "models that are pulled"
    return PlainTextResponse(f"llmjax {__version__} serves {models} with OpenAI's API under /v1\n")


def ops_routes(collectors: CollectorRegistry) -> list[Route]:
    async def metrics(_: Request) -> Response:
        """Counters and times, for Prometheus."""
        return Response(generate_latest(collectors), headers={"content-type": CONTENT_TYPE_LATEST})

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
        Route("/load", load, methods=["GET"]),
        Route("/server_info", server_info, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
