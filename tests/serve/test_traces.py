"""Spans of requests, as a collector gets them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from llmjax.config import ServerConfig
from llmjax.errors import ConfigError
from llmjax.serve.app import create_app
from llmjax.serve.traces import otlp_tracer
from tests.serve.conftest import Running

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """The address of one that keeps what it gets: path and body."""
    taken: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", taken
    server.shutdown()
    thread.join()
    server.server_close()


def test_each_request_for_an_answer_has_a_span(
    running: Running, collector: tuple[str, list[tuple[str, bytes]]]
) -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    address, taken = collector
    tracer: Any = otlp_tracer(address)
    app = create_app(running.engine, ServerConfig(), tracer=tracer)
    headers = {"X-Request-Id": "mine", "traceparent": f"00-{TRACE}-{SPAN}-01"}
    body = {"prompt": "the end", "max_tokens": 5, "temperature": 0.5, "ignore_eos": True, "stream": True}

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            answers = [
                await client.post("/v1/completions", json=body, headers=headers),
                await client.post("/v1/completions", json={**body, "n": 0}),
                await client.post("/tokenize", json={"prompt": "the end"}),
            ]
        return [answer.status_code for answer in answers]

    assert asyncio.run_coroutine_threadsafe(ask(), running.loop).result() == [200, 400, 200]
    assert tracer.span_processor.force_flush()
    assert {path for path, _ in taken} == {"/v1/traces"}
    found = [service.ExportTraceServiceRequest.FromString(content).resource_spans for _, content in taken]
    resources = [resource for resources in found for resource in resources]
    told = {entry.key: entry.value.string_value for entry in resources[0].resource.attributes}
    assert told["service.name"] == "llmjax"
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    answered, refused = spans
    assert answered.name == refused.name == "llm_request"
    assert (answered.trace_id.hex(), answered.parent_span_id.hex()) == (TRACE, SPAN)
    assert not refused.parent_span_id and refused.trace_id != answered.trace_id
    values = {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in answered.attributes}
    exact = {
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.response.model": running.engine.info.model_name,
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.completion_tokens": 5,
    }
    assert values.items() >= exact.items() and values["gen_ai.usage.prompt_tokens"] > 2
    phases = [values[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_in_model_inference")]
    assert 0 <= sum(phases) <= values["gen_ai.latency.e2e"]
    parts = [values[f"gen_ai.latency.time_in_model_{name}"] for name in ("prefill", "decode")]
    assert sum(parts) == pytest.approx(phases[1])
    assert {entry.key: entry.value.int_value for entry in refused.attributes}["http.response.status_code"] == 400
    assert answered.status.code == refused.status.code == 0, "errors are those of the server"
    tracer.span_processor.shutdown()


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://", ""])
def test_what_is_not_a_collector(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint must be the URL"):
        otlp_tracer(endpoint)
