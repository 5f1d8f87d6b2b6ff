"""What a server's engine did, read from its Prometheus page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from llmjax.bench.client import OpenAIClient, RequestFailed
from llmjax.bench.metrics import EngineWork

COUNTERS = ("llmjax:steps_total", "llmjax:step_host_seconds_total", "llmjax:compilations_total")


async def work_of_server(client: OpenAIClient) -> EngineWork | None:
    """The engine's counters since its start; None: the server is another one, or does not show them."""
    try:
        page = (await client.get("/metrics")).text
    except RequestFailed:
        return None
    return parse_work(page)


def parse_work(page: str) -> EngineWork | None:
    """The counters on a page in Prometheus' text format; None: they are not there, or it is not such a page."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name in COUNTERS:
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except ValueError:
        return None
    if len(found) < len(COUNTERS):
        return None
    steps, host_seconds, compilations = (found[name] for name in COUNTERS)
    return EngineWork(steps=int(steps), host_seconds=host_seconds, compilations=int(compilations))
