"""OpenTelemetry: a span for each request for an answer (``--otlp-traces-endpoint``).

Spans are sent by a thread of OpenTelemetry's own, in batches; what a collector does not take in time is dropped. Names
of attributes are those of vLLM and of the conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llmjax.errors import ConfigError
from llmjax.serve.context import RequestRecord, is_post, path_of
from llmjax.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

SPAN = "llm_request"
TRACES_PATH = "/v1/traces"  # of collectors, where the endpoint names none
EXPORT_SECONDS = 5  # that a collector has to take a batch


def otlp_tracer(endpoint: str) -> Tracer:
    """What makes spans and sends them to a collector, as OTLP over HTTP.

    Args:
        endpoint: the collector's, such as ``http://localhost:4318``; OpenTelemetry's own environment variables may add
            headers, certificates and resource attributes.

    Raises:
        ConfigError: it is not such an address, or OpenTelemetry is not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"otlp_traces_endpoint must be the URL of a collector that takes OTLP over HTTP, such as "
            f"http://localhost:4318, not {endpoint!r}"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry ({error})", hint="pip install 'llmjax[otel]'"
        ) from error
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # the user has named none
        resource = resource.merge(Resource({SERVICE_NAME: "llmjax"}))
    provider = TracerProvider(resource=resource)  # it sends what is left when the process ends
    url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + TRACES_PATH
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECONDS)))
    return provider.get_tracer("llmjax", __version__)


class Traces:
    """Makes the spans, as children of those that requests name in ``traceparent``.

    Args:
        paths: paths whose POST requests are traced.
        model: name of what is served, where a request's record names none.
        tracer: what `otlp_tracer` returns.
    """

    def __init__(self, app: ASGIApp, *, paths: frozenset[str], model: str, tracer: Tracer) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._paths = paths
        self._model = model
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_post(scope, self._paths):
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        record: RequestRecord = scope["state"]["record"]
        context = self._propagator.extract(Headers(scope=scope))
        span = self._tracer.start_span(SPAN, context=context, kind=SpanKind.SERVER)
        try:
            await self._app(scope, receive, send)
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, str(error)[:200]))
            raise
        finally:
            span.set_attribute("http.route", path_of(scope))
            span.set_attribute("gen_ai.response.model", record.model or self._model)
            for name, value in _attributes(record):
                span.set_attribute(name, value)
            if record.status >= 500:  # others are their clients' errors
                span.set_status(Status(StatusCode.ERROR, record.error))
            span.end()


def _attributes(record: RequestRecord) -> Iterator[tuple[str, Any]]:
    """What is known of a request; times in seconds."""
    times = record.times
    arrival = scheduled = first = last = None
    if times is not None:
        arrival, scheduled = times.arrival_time, times.first_scheduled_time
        first, last = times.first_token_time, times.last_token_time
    attributes = {
        "gen_ai.request.id": record.id,
        **{f"gen_ai.request.{name}": value for name, value in record.asked.items()},
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.completion_tokens,
        "gen_ai.latency.e2e": time.perf_counter() - record.started,
        "gen_ai.latency.time_in_queue": _between(arrival, scheduled),
        "gen_ai.latency.time_to_first_token": _between(arrival, first),
        "gen_ai.latency.time_in_model_prefill": _between(scheduled, first),
        "gen_ai.latency.time_in_model_decode": _between(first, last),
        "gen_ai.latency.time_in_model_inference": _between(scheduled, last),
        "http.response.status_code": record.status or None,
    }
    return ((name, value) for name, value in attributes.items() if value is not None)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)
