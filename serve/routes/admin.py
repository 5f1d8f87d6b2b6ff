"""What operators ask of a running server. It needs a key of theirs: whoever may use the server may not do this to the
others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.serve.access import check_key, check_operator, is_admin
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import ignored_fields, is_of, owner_of, shared_of
from llmjax.serve.errors import ApiError
from llmjax.serve.interfaces import Engine
from llmjax.serve.models import Entry, loaded, models_of
from llmjax.serve.protocol.admin import AbortRequest

SWITCH = {"true": True, "1": True, "false": False, "0": False}


async def reset_prefix_cache(request: Request) -> Response:
    """Forget what past requests have computed."""
    async with _using(request) as engine:
        await engine.reset_prefix_cache()
    return Response()


async def abort_requests(request: Request) -> Response:
    """End running requests of the same key, or with an operator's of any: those of some ids, or all."""
    check_key(request, shared_of(request).config)
    body = parse(await read_json(request), AbortRequest, ignored=ignored_fields(request))
    wanted = None if body.request_ids is None else frozenset(body.request_ids)
    every, owner = is_admin(request), owner_of(request)
    aborted = 0
    for engine in [entry.server.engine for entry in models_of(request).entries if entry.server is not None]:
        request_ids = [name for name in engine.request_ids if every or is_of(name, owner)]
        for name in request_ids:
            if wanted is None or not wanted.isdisjoint(_names(name)):
                await engine.abort(name)
                aborted += 1
    return _json({"status": "aborted", "aborted": aborted})


async def pause(request: Request) -> Response:
    """Hold new requests back until they are resumed (query: mode, abort, wait or keep; clear_cache)."""
    _entry(request)
    query = request.query_params
    mode = "wait" if _switch(request, "wait_for_inflight_requests", default=False) else query.get("mode", "abort")
    async with _using(request) as engine:
        await engine.pause_generation(mode, clear_cache=_switch(request, "clear_cache", default=True))
    return _json({"status": "paused"})


async def resume(request: Request) -> Response:
    """Let requests go on that are held back."""
    async with _using(request) as engine:
        await engine.resume_generation()
    return _json({"status": "resumed"})


async def is_paused(request: Request) -> Response:
    """Whether requests are held back."""
    return _json({"is_paused": (server := _entry(request).server) is not None and server.engine.is_paused})


async def sleep(request: Request) -> Response:
    """Free the device's memory until the model is woken (query: level, 1 or 2; mode, abort or wait)."""
    _entry(request)
    level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
    if level not in ("1", "2"):
        raise ApiError("level must be 1 or 2", param="level", code="invalid_value")
    async with _using(request) as engine:
        await engine.sleep(int(level), mode)
    return Response()


async def wake_up(request: Request) -> Response:
    """Take back what sleeping has freed (query: tags, weights or kv_cache; all without)."""
    async with _using(request) as engine:
        await engine.wake_up(request.query_params.getlist("tags") or None)
    return Response()


async def is_sleeping(request: Request) -> Response:
    """Whether the model sleeps."""
    return _json({"is_sleeping": _entry(request).state == "sleeping"})


async def start_profile(request: Request) -> Response:
    """Begin to write down what is computed, in --profile-dir."""
    async with _using(request) as engine:
        await engine.start_profile()
    return Response()


async def stop_profile(request: Request) -> Response:
    """End the profile and write it."""
    async with _using(request) as engine:
        await engine.stop_profile()
    return Response()


async def reset_cache_of_media(request: Request) -> Response:
    """Say that no image is out of date: they are found by their content."""
    _entry(request)
    return Response()


def _json(answer: dict[str, Any]) -> Response:
    return Response(orjson.dumps(answer), media_type="application/json")


def _switch(request: Request, name: str, *, default: bool) -> bool:
    """A parameter of the query that is true or false."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if (value := SWITCH.get(given.lower())) is None:
        raise ApiError(f"{name} must be true or false", param=name, code="invalid_value")
    return value


def _names(engine_id: str) -> tuple[str, str]:
    """The id of an answer, to which its engine requests' ids add a suffix, and the request's id, which is the answer's
    without its kind."""
    answer = engine_id.rpartition("-")[0]
    return answer, answer.partition("-")[2]


def _entry(request: Request) -> Entry:
    """The model that an operator's request is for: that of the query, or the first one."""
    check_operator(request, shared_of(request).config)
    return models_of(request).find(request.query_params.get("model"))


@asynccontextmanager
async def _using(request: Request) -> AsyncIterator[Engine]:
    """Its engine, which runs."""
    entry = _entry(request)
    loaded(entry)
    async with models_of(request).using(entry.name) as server:
        yield server.engine


ADMIN_ROUTES = [
    Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
    Route("/abort_requests", abort_requests, methods=["POST"]),
    Route("/sleep", sleep, methods=["POST"]),
    Route("/wake_up", wake_up, methods=["POST"]),
    Route("/is_sleeping", is_sleeping, methods=["GET"]),
    Route("/pause", pause, methods=["POST"]),
    Route("/resume", resume, methods=["POST"]),
    Route("/is_paused", is_paused, methods=["GET"]),
    Route("/reset_mm_cache", reset_cache_of_media, methods=["POST"]),
    Route("/reset_encoder_cache", reset_cache_of_media, methods=["POST"]),
    Route("/start_profile", start_profile, methods=["POST"]),
    Route("/stop_profile", stop_profile, methods=["POST"]),
]
