"""Adapters: vLLM's routes that load and unload them, and llama-server's that weigh those of its ``--lora``."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from llmjax.errors import CheckpointError
from llmjax.serve.access import check_operator
from llmjax.serve.adapters import path_below, shown_path
from llmjax.serve.body import parse, read_json, read_value
from llmjax.serve.context import Server, ignored_fields, server_of
from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest, WeighAdaptersRequest, scales_of


async def load_adapter(request: Request) -> Response:
    """Load an adapter from the folder of --lora-root, which requests may name from then on (vLLM)."""
    server, root = _operated(request)
    body = parse(await read_json(request), LoadAdapterRequest, ignored=ignored_fields(request))
    path = await path_below(root, body.lora_path)
    try:
        await server.engine.load_adapter(body.lora_name, path, base=body.base_model_name, replace=body.load_inplace)
    except CheckpointError as error:
        message = str(error).replace(str(path), body.lora_path)
        raise ApiError(message, param="lora_path", code="invalid_adapter") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    """Take an adapter's name away; requests that run keep it until they have ended (vLLM)."""
    server, _ = _operated(request)
    body = parse(await read_json(request), UnloadAdapterRequest, ignored=ignored_fields(request))
    await server.engine.unload_adapter(body.lora_name, number=body.lora_int_id)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def list_fixed(request: Request) -> Response:
    """The adapters of --lora and --lora-scaled, with their factors now (llama-server)."""
    return _json(_fixed(server_of(request)))


async def weigh_fixed(request: Request) -> Response:
    """Set the factors of the adapters of --lora for all requests that name none; the others get 0 (llama-server)."""
    server = server_of(request)
    check_operator(request, server.config)
    body = parse({"lora": await read_value(request)}, WeighAdaptersRequest)
    server.engine.adapters.set_scales(scales_of(body.lora))
    return _json(_fixed(server))


def _fixed(server: Server) -> list[dict[str, Any]]:
    fixed, root = server.engine.adapters.fixed, server.config.lora_root
    return [
        {"id": place, "path": shown_path(root, part.reference.path), "scale": part.scale}
        for place, part in enumerate(fixed)
    ]


def _operated(request: Request) -> tuple[Server, str]:
    """The server whose adapters an operator may change, and their folder; raises ApiError if nobody may."""
    server = server_of(request)
    check_operator(request, server.config)
    if server.config.lora_root is None:
        raise ApiError(
            "adapters are not loaded while this server runs (--lora-root names the folder that they may be in)",
            status=403,
            code="not_enabled",
        )
    return server, server.config.lora_root


def _json(answer: Any) -> Response:
    return Response(orjson.dumps(answer), media_type="application/json")


ADAPTER_ROUTES = [
    Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
    Route("/lora-adapters", list_fixed, methods=["GET"]),
    Route("/lora-adapters", weigh_fixed, methods=["POST"]),
]
