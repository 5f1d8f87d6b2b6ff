"""What a server says of itself: load, settings, tokenizer, and the description of its endpoints."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from llmjax.config import EngineConfig, ServerConfig
from llmjax.serve.app import create_app
from llmjax.serve.drain import Gate
from llmjax.serve.openapi import BODIES, describe
from llmjax.serve.routes.chat import CHAT_ROUTES


def test_load_is_the_number_of_requests_in_progress(running: Any) -> None:
    gate = Gate()
    app = create_app(running.engine, ServerConfig(), gate=gate)

    async def loads() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:

            async def load() -> int:
                value: int = (await client.get("/load")).json()["server_load"]
                return value

            with gate.passing(), gate.passing():
                busy = await load()
            return [busy, await load()]

    assert asyncio.run(loads()) == [2, 0]


def test_server_info_has_settings_without_secrets_and_paths(http: httpx.Client, engine_config: EngineConfig) -> None:
    answer = http.get("/server_info")
    info = answer.json()
    assert info["settings"]["max_num_seqs"] == 4 and info["settings"]["log_level"] == "info"
    assert info["engine"]["max_model_len"] == 512 and info["engine"]["vocab_size"] > 256
    assert {"hf_token", "api_key", "model"}.isdisjoint(info["settings"])
    assert engine_config.model not in answer.text


def test_tokenizer_info(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "<|im_end|>")
    assert info["eos_token_id"] in info["eos_token_ids"] and info["model_max_length"] == 512
    assert "add_generation_prompt" in info["chat_template"]
    ids = http.post("/tokenize", json={"prompt": "", "add_special_tokens": True}).json()["tokens"]
    assert ids == [info["bos_token_id"]]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_openapi_describes_every_endpoint(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1") and document["info"]["version"]
    paths = document["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model_id}", "/health"} <= paths.keys()
    assert {"/load", "/server_info", "/tokenizer_info", "/docs", "/openapi.json"} <= paths.keys()
    assert paths["/ping"].keys() == {"get", "post"}
    assert all(operation["summary"] for methods in paths.values() for operation in methods.values())
    for reference in references(document):
        name = reference.removeprefix("#/components/schemas/")
        assert name in document["components"]["schemas"]
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["required"] == ["messages"] and schema["additionalProperties"] is False
    assert {"temperature", "best_of", "chat_template_kwargs"} <= schema["properties"].keys()
    assert set(BODIES) <= paths.keys()
    assert "security" not in document


def test_keys_are_described() -> None:
    assert describe(CHAT_ROUTES, keys=True)["security"] == [{"key": []}]


def test_docs_need_nothing_from_elsewhere(http: httpx.Client) -> None:
    answer = http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in answer.text and "ChatRequest" in answer.text
    assert not re.search(r"<script|src=|https?://", answer.text)


@pytest.mark.parametrize("docs", [True, False])
def test_docs_can_be_turned_off(running: Any, docs: bool) -> None:
    app = create_app(running.engine, ServerConfig(docs=docs))
    assert {"/docs", "/openapi.json"} & {getattr(route, "path", "") for route in app.routes} == (
        {"/docs", "/openapi.json"} if docs else set()
    )


def test_what_the_document_says_of_a_body_is_json(http: httpx.Client) -> None:
    assert json.loads(http.get("/openapi.json").content)["components"]["schemas"]["StreamOptions"]["properties"]
