"""/openapi.json and /docs, generated from the routes and the protocol types."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from llmjax.serve.error_codes import ERROR_CODES
from llmjax.serve.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from llmjax.serve.protocol.admin import AbortRequest
from llmjax.serve.protocol.batches import BatchRequest
from llmjax.serve.protocol.chat import BatchChatRequest, ChatRequest
from llmjax.serve.protocol.common import ApiModel
from llmjax.serve.protocol.completions import CompletionRequest
from llmjax.serve.protocol.generate import GenerateRequest, GenerativeScoringRequest
from llmjax.serve.protocol.llama_server import (
    LlamaCompletionRequest,
    LlamaEmbeddingRequest,
    LlamaInfillRequest,
    LlamaTokenizeRequest,
)
from llmjax.serve.protocol.meanings import REFUSED, meaning
from llmjax.serve.protocol.messages import CountTokensRequest, MessagesRequest
from llmjax.serve.protocol.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaNameRequest,
)
from llmjax.serve.protocol.pooling import (
    ClassifyChatRequest,
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingChatRequest,
    EmbeddingRequest,
    PoolingChatRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from llmjax.serve.protocol.responses import InputTokensRequest, ResponsesRequest
from llmjax.serve.protocol.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from llmjax.version import __version__

# The bodies that an endpoint takes, one of them.
BODIES: Mapping[str, tuple[type[ApiModel], ...]] = {
    "/v1/chat/completions": (ChatRequest,),
    "/v1/chat/completions/batch": (BatchChatRequest,),
    "/v1/completions": (CompletionRequest,),
    "/v1/chat/completions/render": (ChatRequest,),
    "/v1/completions/render": (CompletionRequest,),
    "/inference/v1/generate": (GenerateRequest,),
    "/generative_scoring": (GenerativeScoringRequest,),
    "/v1/messages": (MessagesRequest,),
    "/v1/messages/count_tokens": (CountTokensRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/v1/responses/input_tokens": (InputTokensRequest,),
    "/v1/embeddings": (EmbeddingRequest, EmbeddingChatRequest),
    "/v2/embed": (CohereEmbedRequest,),
    "/pooling": (PoolingRequest, PoolingChatRequest),
    "/classify": (ClassifyRequest, ClassifyChatRequest),
    **dict.fromkeys(("/score", "/v1/score"), (ScoreRequest,)),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), (RerankRequest,)),
    "/v1/batches": (BatchRequest,),
    "/api/chat": (OllamaChatRequest,),
    "/api/generate": (OllamaGenerateRequest,),
    "/api/embed": (OllamaEmbedRequest,),
    "/api/embeddings": (OllamaEmbeddingsRequest,),
    **dict.fromkeys(("/api/show", "/api/pull", "/api/delete"), (OllamaNameRequest,)),
    **dict.fromkeys(("/completion", "/completions"), (LlamaCompletionRequest,)),
    "/infill": (LlamaInfillRequest,),
    **dict.fromkeys(("/embedding", "/embeddings"), (LlamaEmbeddingRequest,)),
    "/apply-template": (ChatRequest,),
    "/invocations": (
        *(ChatRequest, CompletionRequest, EmbeddingRequest, EmbeddingChatRequest, ClassifyRequest, ClassifyChatRequest),
        *(ScoreRequest, RerankRequest),
    ),
    "/abort_requests": (AbortRequest,),
    "/v1/load_lora_adapter": (LoadAdapterRequest,),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest,),
    "/tokenize": (TokenizeTextRequest, TokenizeChatRequest, LlamaTokenizeRequest),
    "/detokenize": (DetokenizeRequest,),
}
STREAMS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/messages",
        "/inference/v1/generate",
        "/invocations",
        "/completion",
        "/completions",
        "/infill",
    }
)

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {
                    "type": ["string", "null"],
                    "description": "\n".join(f"* {name}: {known.cause}" for name, known in ERROR_CODES.items()),
                },
            },
        }
    },
}


def describe(routes: Iterable[BaseRoute], *, keys: bool, root_path: str = "") -> dict[str, Any]:
    """The OpenAPI 3.1 document of some routes.

    Args:
        keys: whether requests need one.
        root_path: the path at which a proxy has the server.
    """
    models = {model for bodies in BODIES.values() for model in bodies}
    _, schemas = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    bodies = {model.__name__: model for model in models}
    for kind, schema in schemas["$defs"].items():
        for name, field in schema.get("properties", {}).items():
            field["description"] = told_of(bodies[kind], name) if kind in bodies else meaning(kind, name) or REFUSED
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route):
            path = re.sub(r":\w+}", "}", route.path)  # {model_id:path}
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths.setdefault(path, {})[method.lower()] = _operation(route, path, method)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "llmjax", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**schemas.get("$defs", {}), "Error": ERROR}},
    }
    if root_path:
        document["servers"] = [{"url": root_path}]
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def told_of(model: type[ApiModel], name: str) -> str:
    """What a field of a body means, or why it is refused."""
    if name in model.neutral_values:
        return model.reasons.get(name, REFUSED).removeprefix("is ")
    return meaning(model.__name__, name) or REFUSED


def _operation(route: Route, path: str, method: str) -> dict[str, Any]:
    told = (inspect.getdoc(route.endpoint) or "").partition("\n\n")[0]
    answer: dict[str, Any] = {"description": "the answer"}
    if path in STREAMS:
        answer["content"] = {"application/json": {}, "text/event-stream": {}}
    failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "summary": " ".join(told.split()) or route.name.replace("_", " "),
        "operationId": route.name,
        "responses": {"200": answer, "default": {"description": "an error", "content": failure}},
    }
    if names := re.findall(r"{(\w+)}", path):
        schema = {"type": "string"}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if path in BODIES and method in ("POST", "DELETE"):
        references = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in BODIES[path]]
        schema = references[0] if len(references) == 1 else {"oneOf": references}  # type: ignore[dict-item]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def page(document: Mapping[str, Any]) -> str:
    """A document for people: no script, and nothing that a browser would fetch elsewhere."""
    rows = [
        f"<tr><td>{method.upper()}</td><td><code>{html.escape(path)}</code></td>"
        f"<td>{html.escape(operation['summary'])}</td></tr>"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    types = [_type(name, schema) for name, schema in document["components"]["schemas"].items()]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>llmjax</title>"
        "<style>body{font:16px sans-serif;margin:2em}td{padding:2px 1em 2px 0;vertical-align:top}</style>"
        f"<h1>llmjax {html.escape(document['info']['version'])}</h1>"
        '<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"<table>{''.join(rows)}</table>{''.join(types)}</html>"
    )


def _type(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    fields = [
        f"<tr><td><code>{html.escape(field)}</code>{' (required)' if field in required else ''}</td>"
        f"<td>{html.escape(_kind(kind))}</td><td>{html.escape(kind.get('description', ''))}</td></tr>"
        for field, kind in schema.get("properties", {}).items()
    ]
    return f"<h2>{html.escape(name)}</h2><table>{''.join(fields)}</table>"


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_kind(one) for one in schema[several])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def docs_routes(routes: list[BaseRoute], *, keys: bool, root_path: str = "") -> list[Route]:
    """The two endpoints, for these routes and themselves."""
    made: list[Route] = []
    document: dict[str, Any] = {}

    def described() -> dict[str, Any]:
        if not document:  # when it is first asked for: it takes some milliseconds
            document.update(describe([*routes, *made], keys=keys, root_path=root_path))
        return document

    async def openapi(_: Request) -> Response:
        """This server's endpoints as an OpenAPI document."""
        return Response(orjson.dumps(described()), media_type="application/json")

    async def docs(_: Request) -> Response:
        """This server's endpoints, for people."""
        return HTMLResponse(page(described()))

    made += [Route("/openapi.json", openapi, methods=["GET"]), Route("/docs", docs, methods=["GET"])]
    return made
