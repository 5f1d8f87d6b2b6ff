"""Every field of every body with values of every kind: taken, or a 4xx that names the field; never an error of ours."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from llmjax.serve import openapi

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    "",
    "x",
    "\ud7ff\u0000",
    [],
    [None],
    [True],
    ["x", 1],
    [[1]],
    [{}],
    {},
    {"x": None},
    {"type": 1},
    {"type": "x", "x": {"x": []}},
]
MESSAGES = [{"role": "user", "content": "x"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
    ("/v1/responses/input_tokens", {"input": "x"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/tokenize", {"prompt": "x"}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [40]}),
    ("/v1/chat/completions/render", {"messages": MESSAGES}),
    ("/v1/completions/render", {"prompt": "x"}),
    ("/v1/chat/completions/batch", {"messages": [MESSAGES], "max_tokens": 1}),
    ("/inference/v1/generate", {"token_ids": [40], "sampling_params": {"max_tokens": 1}}),
    ("/generative_scoring", {"query": "x", "items": ["y"], "label_token_ids": [40, 41]}),
    ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 1}}),
    ("/api/generate", {"prompt": "x", "options": {"num_predict": 1}}),
    ("/api/show", {"model": "tiny-llama"}),
    ("/completion", {"prompt": "x", "n_predict": 1}),
    ("/completions", {"prompt": "x", "n_predict": 1}),
    ("/apply-template", {"messages": MESSAGES}),
    ("/v1/batches", {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}),
]
EITHER = {"messages": "prompt", "prompt": "messages"}  # of /tokenize


def fields_of(http: httpx.Client, path: str, *, method: str = "POST") -> list[str]:
    """Names of the fields that a body may have, as /openapi.json says."""
    described = http.get("/openapi.json").json()
    body = described["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
    types = [schema["$ref"].rsplit("/", 1)[1] for schema in body.get("oneOf", [body])]
    return sorted({name for kind in types for name in described["components"]["schemas"][kind]["properties"]})


def check_fields(
    http: httpx.Client, path: str, base: dict[str, Any], *, together: tuple[str, ...] = (), method: str = "POST"
) -> list[str]:
    """What is wrong with the answers to bodies of which one field has a value of another kind.

    Args:
        together: fields of which an error names one where it is about all.
    """
    wrong = []
    for field in fields_of(http, path, method=method):
        rest = {name: given for name, given in base.items() if name != EITHER.get(field)}
        names = together if field in together else (field,)
        for value in VALUES:
            answer = http.request(method, path, json={**rest, field: value})
            if answer.status_code == 200:
                continue
            error = answer.json()["error"]
            error = {"message": error} if isinstance(error, str) else error  # Ollama's
            if answer.status_code == 404 and (error.get("param") in base or path.startswith("/api/")):
                continue  # what the body is about is not there, and was looked for last
            said = error.get("param") or error["message"]
            clear = len(error["message"]) <= 1000 and "\n" not in error["message"]
            if not (400 <= answer.status_code < 500 and clear and any(name in said for name in names)):
                wrong.append(f"{path} {field}={value!r}: {answer.status_code} {error}")
    return wrong


# Their fields are those of other paths, and are read by the same code.
AS_OTHERS = ("/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/completions/render")
AS_OTHERS += ("/completions", "/apply-template")
AS_OTHERS += ("/v1/responses/input_tokens", "/v1/messages/count_tokens")


@pytest.mark.parametrize(
    ("path", "base"),
    [pytest.param(*body, marks=pytest.mark.slow if body[0] in AS_OTHERS else ()) for body in BODIES],
    ids=str,
)
def test_values_of_all_kinds(
    http: httpx.Client, path: str, base: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert check_fields(http, path, base) == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(("path", "base"), BODIES, ids=str)
def test_null_is_as_good_as_nothing(http: httpx.Client, path: str, base: dict[str, Any]) -> None:
    nulls = {field: None for field in fields_of(http, path) if field not in base}
    plain, given = (http.post(path, json=body) for body in (base, {**base, **nulls}))
    assert given.status_code == plain.status_code, given.text


# Tested with models for vectors, with adapters and where models are pulled, or asked by what they hold.
ELSEWHERE = {
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/api/embed",
    "/api/embeddings",
    "/api/delete",
    "/api/pull",
    "/infill",
    "/embedding",
    "/embeddings",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}
ELSEWHERE |= {"/invocations", "/abort_requests"}


def test_no_body_is_left_out() -> None:
    assert openapi.BODIES.keys() - {path for path, _ in BODIES} == ELSEWHERE
