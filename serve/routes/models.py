"""GET /v1/models and /v1/models/{id}, in the shapes of OpenAI and of Anthropic."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.serve.adapters import shown_path
from llmjax.serve.context import Server, model_root
from llmjax.serve.models import Entry, models_of


def card_of(entry: Entry, name: str) -> dict[str, Any]:
    """What is shown of a model, or of one of its adapters, by its name."""
    known, adapter = entry.last, entry.adapter(name)
    root, parent = model_root(entry.name, entry.config), None
    if adapter is not None:
        root = shown_path(None if known is None else known.config.lora_root, adapter.path)
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


def _of_anthropic(card: dict[str, Any]) -> dict[str, Any]:
    """The card with the fields of Anthropic's own."""
    created = datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    most = card["max_model_len"]
    return card | {
        "type": "model",
        "display_name": card["id"],
        "lifecycle": "active",
        "created_at": created,
        "max_input_tokens": most,
        "max_tokens": most,
    }


def _asks_anthropic(request: Request) -> bool:
    """Whether the client is one of Anthropic's API, whose route has the same path as OpenAI's."""
    return "anthropic-version" in request.headers


def _modalities(server: Server) -> list[str]:
    """What the model reads."""
    if server.pictures is None:
        return ["text"]
    return ["text", "image", *(["video"] if server.pictures.images.video_placeholder else [])]


async def list_models(request: Request) -> Response:
    """The models, under each of their names, their adapters, and which of the models are loaded."""
    cards = [card_of(entry, name) for entry in models_of(request).entries for name in entry.listed]
    answer: dict[str, Any] = {"object": "list", "data": cards}
    if _asks_anthropic(request):
        shown = [_of_anthropic(card) for card in cards]
        first, last = (cards[0]["id"], cards[-1]["id"]) if cards else (None, None)
        answer |= {"data": shown, "has_more": False, "first_id": first, "last_id": last}
    return Response(orjson.dumps(answer), media_type="application/json")


async def get_model(request: Request) -> Response:
    """One of them."""
    name = request.path_params["model_id"]
    entry = models_of(request).find(name)
    card = card_of(entry, name if name in entry.names else entry.shown_name(name))
    answer = _of_anthropic(card) if _asks_anthropic(request) else card
    return Response(orjson.dumps(answer), media_type="application/json")


# Model ids may hold slashes.
MODEL_ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model_id:path}", get_model, methods=["GET"]),
]
