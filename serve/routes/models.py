"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.serve.adapters import shown_path
from llmjax.serve.context import Server, server_of


def _card(server: Server, name: str) -> dict[str, Any]:
    engine = server.engine
    adapter = engine.adapters.named(name)
    root, parent = server.model_root, None
    if adapter is not None:
        root, parent = (
            shown_path(server.config.lora_root, adapter.reference.path),
            adapter.base or engine.info.model_name,
        )
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "llmjax",
        "root": root,
        "parent": parent,
        "max_model_len": engine.info.max_model_len,
        "input_modalities": _modalities(server),
    }


def _modalities(server: Server) -> list[str]:
    """What the model reads."""
    if server.pictures is None:
        return ["text"]
    return ["text", "image", *(["video"] if server.pictures.images.video_placeholder else [])]


async def list_models(request: Request) -> Response:
    """The names under which the model is served, and its adapters."""
    server = server_of(request)
    adapters = [adapter.reference.name for adapter in server.engine.adapters.listed]
    names = [*(server.engine.config.served_names or (server.engine.info.model_name,)), *adapters]
    body = {"object": "list", "data": [_card(server, name) for name in names]}
    return Response(orjson.dumps(body), media_type="application/json")


async def get_model(request: Request) -> Response:
    """One of them."""
    server = server_of(request)
    name = request.path_params["model_id"]
    server.check_model(name)
    shown_name = name if name in server.engine.config.served_names else server.answer_name(name)
    return Response(orjson.dumps(_card(server, shown_name)), media_type="application/json")


# Model ids may hold slashes.
MODEL_ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model_id:path}", get_model, methods=["GET"]),
]
