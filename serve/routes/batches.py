"""/v1/batches: files of requests, answered beside others."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.serve.batches.lines import ENDPOINTS
from llmjax.serve.batches.service import Batch, Batches
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import KEY, KEY_SALT, ignored_fields, owner_of, shared_of
from llmjax.serve.errors import ApiError
from llmjax.serve.files import page_of
from llmjax.serve.protocol.batches import BatchRequest
from llmjax.serve.routes.files import listing

MOST_LISTED = 100


async def create_batch(request: Request) -> Response:
    """Answer the requests of a file."""
    server = shared_of(request)
    body = parse(await read_json(request), BatchRequest, ignored=ignored_fields(request))
    if body.endpoint not in ENDPOINTS:
        raise ApiError(
            f"`endpoint` must be one of {', '.join(sorted(ENDPOINTS))}", param="endpoint", code="invalid_value"
        )
    owner = owner_of(request)
    file = server.files.get(owner, body.input_file_id, field="input_file_id")
    if file.purpose != "batch":
        raise ApiError(
            "`input_file_id` must name a file whose purpose is batch", param="input_file_id", code="invalid_value"
        )
    state = request.scope["state"]
    batch = _batches(request).create(
        state={name: state[name] for name in (KEY, KEY_SALT) if name in state},
        owner=owner,
        file=file,
        endpoint=body.endpoint,
        metadata=body.metadata,
    )
    return _json(batch.body())


async def list_batches(request: Request) -> Response:
    """The batches of a key."""
    batches = _batches(request).of(owner_of(request))
    shown, more = page_of(batches, lambda batch: batch.id, request.query_params, most=MOST_LISTED)
    return _json(listing([batch.body() for batch in shown], more=more))


async def get_batch(request: Request) -> Response:
    """How far a batch is."""
    return _json(_batch(request).body())


async def cancel_batch(request: Request) -> Response:
    """End a batch; what it has answered is kept."""
    batch = _batch(request)
    _batches(request).cancel(batch)
    return _json(batch.body())


def _batches(request: Request) -> Batches:
    batches: Batches = request.app.state.batches
    return batches


def _batch(request: Request) -> Batch:
    return _batches(request).get(owner_of(request), request.path_params["batch_id"])


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


BATCH_ROUTES = [
    Route("/v1/batches", create_batch, methods=["POST"]),
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches/{batch_id}", get_batch, methods=["GET"]),
    Route("/v1/batches/{batch_id}/cancel", cancel_batch, methods=["POST"]),
]
