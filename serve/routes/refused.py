"""Routes of other servers that this one has not: 501, with the reason, where 404 would let people look for a typo."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.serve.context import path_of
from llmjax.serve.errors import ApiError, cut

_TEXT = "models read text and pictures, and write text"
_WEIGHTS = "weights come from files; a server that sleeps and is woken loads those of its model again"
_SIZE = "how many processes run the model is decided at the start (--data-parallel-size)"
_CHATS = "chats go to /v1/chat/completions, /v1/responses or /v1/messages"
_RENDER = "use /v1/chat/completions/render or /v1/completions/render"
_DERENDER = "/inference/v1/generate returns the text too with output_mode text, and /detokenize that of any tokens"
_KOBOLD = "KoboldCpp's API is not spoken: use /v1/completions or /v1/chat/completions, or llama-server's /completion"
_WEB_UI = "text-generation-webui's own API is not spoken: use /v1/completions, /v1/models, /tokenize and /detokenize"
_CREATE = "models are files; what a Modelfile says stands in the file of --config, and in requests"
REASONS: Mapping[str, str] = {
    "/v1/audio/transcriptions": _TEXT,
    "/v1/audio/translations": _TEXT,
    "/v1/audio/speech": _TEXT,
    "/v1/images/generations": _TEXT,
    "/v1/images/edits": _TEXT,
    "/v1/realtime": f"{_TEXT}; streams are server-sent events",
    "/v1/responses/render": _RENDER,
    "/v1/messages/render": _RENDER,
    "/v1/completions/derender": _DERENDER,
    "/v1/chat/completions/derender": _DERENDER,
    "/v1/systemone": _CHATS,
    "/cohere/v2/chat": _CHATS,
    "/collective_rpc": "code in requests is never run",
    "/scale_elastic_ep": _SIZE,
    "/is_scaling_elastic_ep": _SIZE,
    "/fault_tolerance/{call:path}": "an engine's process that dies is restarted automatically",
    "/get_world_size": _WEIGHTS,
    "/init_weight_transfer_engine": _WEIGHTS,
    "/start_weight_update": _WEIGHTS,
    "/update_weights": _WEIGHTS,
    "/finish_weight_update": _WEIGHTS,
    "/slots/{slot}": "prompts that are cached are found by their tokens, and pages are not written to files",
    "/api/copy": "a model has the names that its settings give it (served_model_name), or that it was pulled by",
    "/api/create": _CREATE,
    "/api/blobs/{digest}": _CREATE,
    "/api/push": "models are pulled, and none are published",
    "/api/v1/{call:path}": _KOBOLD,
    "/api/latest/{call:path}": _KOBOLD,
    "/api/extra/{call:path}": _KOBOLD,
    "/v1/internal/{call:path}": _WEB_UI,
}


def _refusing(reason: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        path = cut(path_of(request.scope))
        raise ApiError(f"there is no {path} here: {reason}", status=501, code="not_implemented")

    return refuse


REFUSED_ROUTES = [Route(path, _refusing(reason), methods=["GET", "POST"]) for path, reason in REASONS.items()]
