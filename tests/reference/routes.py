"""docs/reference/routes.md, written from the server's routes, its OpenAPI document and the types of bodies."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from llmjax.config import ServerConfig
from llmjax.sampling.params import RANGES, Range
from llmjax.serve.app import routes_of
from llmjax.serve.openapi import BODIES, describe, told_of
from llmjax.serve.protocol.chat import ChatTemplateFields
from llmjax.serve.protocol.common import SAME_NAME, ApiModel, GenerationRequest
from llmjax.serve.protocol.pooling import PooledBody, VectorFields
from llmjax.serve.routes.refused import REASONS
from tests.reference.markdown import cell, code

HEAD = """# Routes and fields

```console
$ curl http://localhost:8000/openapi.json
```

This page is written from the routes and the types of their bodies. A server shows the same of itself at `/docs`
and, for programs, at `/openapi.json`. [How the API behaves](../api.md) says more about some of them,
[errors](errors.md) what failures mean.

Null is accepted everywhere and means the default, which for sampling is what the model's makers recommend.
Unknown fields are a 400 that names them. Fields below *Refused* are known from other servers, and a 400 unless
they have a value that asks for nothing.
"""
# Fields that several bodies share, with the name of their section.
SHARED: Mapping[type[ApiModel], str] = {
    GenerationRequest: "Fields of requests for text",
    ChatTemplateFields: "Fields of conversations",
    PooledBody: "Fields of requests for vectors and scores",
    VectorFields: "Forms of vectors",
}
TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "object"}


def page() -> str:
    """The page as Markdown."""
    document = describe(routes_of(ServerConfig(), CollectorRegistry()), keys=False)
    return "\n".join([HEAD, *_routes(document), *_bodies(document), *_refused_routes()])


def _routes(document: Mapping[str, Any]) -> Iterator[str]:
    yield "## Routes\n\n| route | | body |\n|---|---|---|"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            bodies = ", ".join(
                f"[{body.__name__}](#{body.__name__.lower()})"
                for body in (BODIES.get(path, ()) if method == "post" else ())
            )
            yield f"| `{method.upper()} {path}` | {cell(operation['summary'])} | {bodies} |"
    yield ""


def _bodies(document: Mapping[str, Any]) -> Iterator[str]:
    schemas = document["components"]["schemas"]
    bodies = sorted({body for some in BODIES.values() for body in some}, key=lambda body: body.__name__)
    for shared, title in SHARED.items():
        yield f"## {title}\n"
        properties = shared.model_json_schema(ref_template="{model}")["properties"]
        yield from _fields(
            shared, {name: kind | {"description": told_of(shared, name)} for name, kind in properties.items()}
        )
    yield "## Bodies\n"
    for body in bodies:
        yield f"### {body.__name__}\n"
        paths = [path for path, some in BODIES.items() if body in some]
        yield f"Of {', '.join(f'`{path}`' for path in paths)}.\n"
        bases = [shared for shared in SHARED if issubclass(body, shared)]
        if bases:
            also = ", ".join(f"[{SHARED[base].lower()}](#{SHARED[base].lower().replace(' ', '-')})" for base in bases)
            yield f"It has the {also} as well.\n"
        schema = schemas[body.__name__]
        own = {name: kind for name, kind in schema["properties"].items() if not _inherited(body, name, bases)}
        if own:
            yield from _fields(body, own, required=schema.get("required", ()))
    yield "## Parts of bodies\n"
    for name, schema in schemas.items():
        if name not in {body.__name__ for body in bodies} and "properties" in schema and name != "Error":
            yield f"### {name}\n"
            yield "| field | value | meaning |\n|---|---|---|"
            for field, kind in schema["properties"].items():
                yield f"| `{field}` | {accepted(kind)} | {cell(kind['description'])} |"
            yield ""


def _inherited(body: type[ApiModel], name: str, bases: list[type[ApiModel]]) -> bool:
    """Whether a field is that of a shared class, and taken or refused as there."""
    return any(
        name in base.model_fields
        and body.model_fields[name].annotation == base.model_fields[name].annotation
        and body.neutral_values.get(name) == base.neutral_values.get(name)
        for base in bases
    )


def _fields(body: type[ApiModel], fields: Mapping[str, Any], *, required: Any = ()) -> Iterator[str]:
    refused = {name: kind for name, kind in fields.items() if name in body.neutral_values}
    taken = {name: kind for name, kind in fields.items() if name not in refused}
    if taken:
        yield "| field | value | meaning |\n|---|---|---|"
        for name, kind in taken.items():
            needed = " (required)" if name in required else ""
            yield f"| `{name}`{needed} | {accepted(kind, name=name)} | {cell(kind.get('description', ''))} |"
        yield ""
    if refused:
        yield "Refused:\n\n| field | asks for nothing | why |\n|---|---|---|"
        for name, kind in refused.items():
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in body.neutral_values[name])
            yield f"| `{name}` | {cell(neutral) or 'null'} | {cell(kind['description'])} |"
        yield ""


def accepted(kind: Mapping[str, Any], *, name: str = "") -> str:
    """The values that a schema allows, in words.

    Args:
        name: the field's, whose range `SamplingParams` knows.
    """
    limits = RANGES.get(name) if name in (*SAME_NAME, "max_tokens", "logprobs", "seed") else None
    text = _values(kind) if limits is None else _range(limits)
    default = kind.get("default")
    if default is None:
        return cell(text)
    return cell(f"{text}; default {code(default) if isinstance(default, str) else json.dumps(default)}")


def _range(limits: Range) -> str:
    text = "integer" if limits.whole else "number"
    if limits.low < -(2**31):
        return f"{text} of 64 bits"
    high = "" if limits.high in (2**31 - 1, math.inf) else f" to {limits.high:,g}"
    return f"{text} {'above' if limits.low_open else 'from'} {limits.low:g}{high}"


def _values(kind: Mapping[str, Any]) -> str:
    if "$ref" in kind:
        name = str(kind["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in kind:
        return code(kind["const"])
    if "enum" in kind:
        return ", ".join(map(code, kind["enum"]))
    for several in ("anyOf", "oneOf"):
        if several in kind:
            found = dict.fromkeys(_values(one) for one in kind[several] if one.get("type") != "null")
            return " or ".join(found)
    if kind.get("type") == "array":
        count = kind.get("maxItems")
        return f"list of {_values(kind.get('items', {}))}" + (f", at most {count}" if count else "")
    text = TYPES.get(str(kind.get("type")), "any")
    if isinstance(inner := kind.get("additionalProperties"), dict) and inner:
        text = f"object of {_values(inner)}"
    limits = [
        *([f"at least {kind['minimum']}"] if "minimum" in kind else []),
        *([f"at most {kind['maximum']}"] if "maximum" in kind else []),
        *([f"at most {kind['maxLength']} characters"] if "maxLength" in kind else []),
    ]
    return ", ".join([text, *limits])


def _refused_routes() -> Iterator[str]:
    yield "## Routes that answer 501\n\n| route | why |\n|---|---|"
    yield from (f"| `{path}` | {cell(reason)} |" for path, reason in REASONS.items())
    yield ""
