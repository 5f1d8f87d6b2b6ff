"""Keys, drain, queue limits, ids and the log line, around an application with its own settings."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from llmjax.config import EngineConfig, ServerConfig
from llmjax.engine.front.adapters import AdapterRegistry
from llmjax.engine.info import EngineState
from llmjax.errors import EngineDead, GenerationFailed, QueueFull
from llmjax.serve.app import create_app
from llmjax.serve.drain import Gate
from tests import virtual_time


class FailingEngine:
    """An engine without a model, in one of the states that a healthy one cannot be put into from outside."""

    config = EngineConfig(model="m")
    info = SimpleNamespace(
        vocab_size=100,
        max_model_len=64,
        kv_tokens=640,
        page_size=32,
        model_name="m",
        default_sampling_params={},
        pooler=None,
        vision=None,
        drafts=0,
    )
    tokenizer = None
    adapters = AdapterRegistry(config, names=())
    num_requests = 0
    states = (EngineState(serving=False),)
    sleep_state = "awake"
    num_held_back = 0

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        raise self.error
        yield

    def check_health(self) -> None:
        raise self.error

    def add_stat_logger(self, logger: Any) -> None: ...


def ask(app: Any, *requests: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.request(method, path, **options) for method, path, options in requests]

    return asyncio.run(main())


def app_of(error: Exception, *, gate: Gate | None = None, **settings: Any) -> Any:
    return create_app(FailingEngine(error), ServerConfig(**settings), gate=gate)  # type: ignore[arg-type]


IDS: dict[str, Any] = {"json": {"prompt": [1, 2]}}


@pytest.mark.parametrize("stream", [False, True])
def test_full_queue_is_503_with_retry_after(stream: bool) -> None:
    body = {"json": {"prompt": [1, 2], "stream": stream}}
    (response,) = ask(app_of(QueueFull("the queue is full", retry_after=2.5)), ("POST", "/v1/completions", body))
    assert response.status_code == 503 and response.headers["retry-after"] == "3"
    assert response.json()["error"] == {
        "message": "the queue is full",
        "type": "server_error",
        "param": None,
        "code": "queue_full",
    }


def test_a_request_that_fails_in_the_engine_is_500_and_says_why() -> None:
    (response,) = ask(app_of(GenerationFailed("logits are not finite")), ("POST", "/v1/completions", IDS))
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "logits are not finite",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }


def test_dead_engine_is_503_everywhere() -> None:
    app = app_of(EngineDead("the engine loop has stopped"))
    health, ping, work = ask(app, ("GET", "/health", {}), ("GET", "/ping", {}), ("POST", "/v1/completions", IDS))
    for response in (health, ping, work):
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the engine loop has stopped"


def test_unexpected_error_is_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    (response,) = ask(app_of(ZeroDivisionError("secret")), ("POST", "/v1/completions", IDS))
    assert response.status_code == 500 and "secret" not in response.text
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" in caplog.text, "the operator sees it"


def test_chat_without_a_tokenizer() -> None:
    body = {"json": {"messages": [{"role": "user", "content": "x"}]}}
    chat, text = ask(
        app_of(EngineDead("x")),
        ("POST", "/v1/chat/completions", body),
        ("POST", "/v1/completions", {"json": {"prompt": "x"}}),
    )
    for response in (chat, text):
        assert response.status_code == 400 and response.json()["error"]["code"] == "no_tokenizer"


def test_closed_gate_turns_work_away() -> None:
    async def main() -> list[httpx.Response]:
        gate = Gate()
        app = app_of(EngineDead("x"), gate=gate, shutdown_timeout=7.0)
        gate.close()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return [
                await client.post("/v1/completions", **IDS),
                await client.get("/health"),
                await client.get("/metrics"),
            ]

    work, health, metrics = asyncio.run(main())
    assert work.status_code == 503 and work.headers["retry-after"] == "7"
    assert work.json()["error"]["code"] == "shutting_down"
    assert health.status_code == 503 and metrics.status_code == 200


def test_gate_empties_and_times_out() -> None:
    async def main() -> None:
        gate = Gate()
        assert await gate.wait_empty(timeout=10)
        with gate.passing():
            with gate.passing():
                assert gate.active == 2
            assert not await gate.wait_empty(timeout=10)
        assert gate.active == 0 and await gate.wait_empty(timeout=10)

    virtual_time.run(main())


def test_access_log_is_one_json_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="llmjax.serve.access"):
        ask(app_of(EngineDead("gone")), ("POST", "/v1/completions", {**IDS, "headers": {"X-Request-Id": "r-1"}}))
    (record,) = (record for record in caplog.records if record.name == "llmjax.serve.access")
    line = json.loads(record.getMessage())
    assert line["request_id"] == "r-1" and line["method"] == "POST" and line["path"] == "/v1/completions"
    assert line["status"] == 503 and line["prompt_tokens"] == 2 and line["ms"] >= 0


def test_the_log_says_why_a_request_was_turned_away_before_its_route(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    gate.close()
    bearer = {"Authorization": "Bearer k"}
    with caplog.at_level(logging.INFO, logger="llmjax.serve.access"):
        answers = ask(
            app_of(EngineDead("x"), gate=gate, api_key=["k"]),
            ("GET", "/v1/models", {"headers": {"Host": "evil.example"}}),
            ("GET", "/v1/models", {}),
            ("POST", "/v1/completions", {**IDS, "headers": bearer}),
        )
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "llmjax.serve.access"]
    assert [line["status"] for line in lines] == [answer.status_code for answer in answers] == [403, 401, 503]
    assert [line["error"] for line in lines] == [answer.json()["error"]["message"] for answer in answers]


def test_settings_switch_log_and_header_off(caplog: pytest.LogCaptureFixture) -> None:
    app = app_of(EngineDead("x"), access_log=False, enable_request_id_headers=False)
    with caplog.at_level(logging.INFO, logger="llmjax.serve.access"):
        (response,) = ask(app, ("GET", "/version", {}))
    assert "x-request-id" not in response.headers
    assert not [record for record in caplog.records if record.name == "llmjax.serve.access"]
