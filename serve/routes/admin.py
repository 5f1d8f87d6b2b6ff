"""What operators ask of a running server. It needs a key: whoever may use the server may not do this to the others."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.serve.body import parse, read_json
from llmjax.serve.context import Server, ignored_fields, server_of
from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.admin import AbortRequest


async def reset_prefix_cache(request: Request) -> Response:
    """Forget what past requests have computed."""
    await _server(request).engine.reset_prefix_cache()
    return Response()


async def abort_requests(request: Request) -> Response:
    """End running requests: those of some ids, or all. Their clients get a 503."""
    server = _server(request)
    body = parse(await read_json(request), AbortRequest, ignored=ignored_fields(request))
    wanted = None if body.request_ids is None else frozenset(body.request_ids)
    for name in server.engine.request_ids:
        if wanted is None or not wanted.isdisjoint(_names(name)):
            await server.engine.abort(name)
    return Response()


def _names(engine_id: str) -> tuple[str, str]:
    """The id of an answer, whose engine requests have something behind it, and the request's id, which is the answer's
    without its kind."""
    answer = engine_id.rpartition("-")[0]
    return answer, answer.partition("-")[2]


def _server(request: Request) -> Server:
    server = server_of(request)
    if not server.config.api_key:
        raise ApiError("this needs a server with keys (--api-key)", status=403, code="key_needed")
    return server


ADMIN_ROUTES = [
    Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
    Route("/abort_requests", abort_requests, methods=["POST"]),
]
