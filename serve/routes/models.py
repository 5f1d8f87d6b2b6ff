"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.serve.adapters import shown_path
from llmjax.serve.context import Server, model_root
from llmjax.serve.models import Entry, models_of


def _card(entry: Entry, name: str) -> dict[str, Any]:
    known, adapter = entry.last, entry.adapter(name)
    root, parent = model_root(entry.name, entry.config), None
    if adapter is not None and known is not None:
        root = shown_path(known.config.lora_root, adapter.reference.path)
        parent = adapter.base or entry.name
    card = {
        "id": name,
        "object": "model",
        "created": entry.created,
        "owned_by": "llmjax",
        "root": root,
        "parent": parent,
        "max_model_len": entry.config.max_model_len if known is None else known.engine.info.max_model_len,
        "input_modalities": ["text"] if known is None else _modalities(known),
        "state": entry.state,
    }
    if entry.pinned is not None:  # of several
        card |= {"pinned": entry.pinned, "expires_in": None if entry.expires is None else round(entry.expires, 1)}
    if entry.failure:
        card["failure"] = entry.failure
    return card


def _modalities(server: Server) -> list[str]:
    """What the model reads."""
    if server.pictures is None:
        return ["text"]
    return ["text", "image", *(["video"] if server.pictures.images.video_placeholder else [])]


async def list_models(request: Request) -> Response:
    """The models, under each of their names, their adapters, and which of the models are loaded."""
    cards = [_card(entry, name) for entry in models_of(request).entries for name in entry.listed]
    return Response(orjson.dumps({"object": "list", "data": cards}), media_type="application/json")


async def get_model(request: Request) -> Response:
    """One of them."""
    name = request.path_params["model_id"]
    entry = models_of(request).find(name)
    card = _card(entry, name if name in entry.names else entry.shown_name(name))
    return Response(orjson.dumps(card), media_type="application/json")


# Model ids may hold slashes.
MODEL_ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model_id:path}", get_model, methods=["GET"]),
]
