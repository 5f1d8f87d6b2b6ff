"""POST /invocations: the one route that Amazon SageMaker asks, for whatever the body is a request for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llmjax.engine.info import PoolerInfo
from llmjax.serve.body import READ, read_json
from llmjax.serve.context import server_of
from llmjax.serve.protocol.pooling import SIDES
from llmjax.serve.routes.chat import chat_completions
from llmjax.serve.routes.completions import completions
from llmjax.serve.routes.pooling import classify, embeddings, pooling, rerank, score


async def invocations(request: Request) -> Response | ASGIApp:
    """A chat, a completion, vectors, labels, scores or a ranking: by the model, and by the fields of the body."""
    request.scope[READ] = body = await read_json(request)
    return await _route(body, server_of(request).engine.info.pooler)(request)


def _route(body: dict[str, Any], pooler: PoolerInfo | None) -> Callable[[Request], Awaitable[Response | ASGIApp]]:
    names = {name for name, value in body.items() if value is not None}
    if pooler is None:
        return chat_completions if "messages" in names else completions
    if "query" in names:
        return rerank
    if any({*sides} <= names for sides in SIDES):
        return score
    if pooler.kind == "each":
        return pooling
    return embeddings if pooler.task == "embed" else classify


INVOCATION_ROUTES = [Route("/invocations", invocations, methods=["POST"])]
