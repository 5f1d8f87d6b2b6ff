"""What a server's engine did, read from its Prometheus page."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from llmjax.bench.client import OpenAIClient, RequestFailed
from llmjax.bench.metrics import DraftWork, EngineWork

COUNTERS = ("llmjax:steps_total", "llmjax:step_host_seconds_total", "llmjax:compilations_total")
DRAFTS = tuple(f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
PROMPTS = ("vllm:request_prefill_time_seconds_sum", "llamacpp:prompt_seconds_total")  # vLLM's and ours, llama-server's
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


async def metrics_page(client: OpenAIClient) -> str:
    """The page; "" if the server does not show it."""
    try:
        return (await client.get("/metrics")).text
    except RequestFailed:
        return ""


async def work_of_server(client: OpenAIClient) -> EngineWork | None:
    """The engine's counters since its start; None: the server is another one, or does not show them."""
    return parse_work(await metrics_page(client))


def parse_work(page: str) -> EngineWork | None:
    """The counters on a page in Prometheus' text format; None: they are not there, or it is not such a page."""
    sums = _sums(page, COUNTERS)
    if sums is None:
        return None
    steps, host_seconds, compilations = sums
    return EngineWork(steps=int(steps), host_seconds=host_seconds, compilations=int(compilations))


def parse_drafts(page: str) -> DraftWork | None:
    """What is drafted, under vLLM's names, which other servers have too; None: nothing, or it is not such a page."""
    sums = _sums(page, DRAFTS)
    if sums is None:
        return None
    drafts, tokens, accepted = map(int, sums)
    places: dict[int, int] = {}
    for sample in _samples(page):
        if sample.name == ACCEPTED_AT and (place := sample.labels.get("position", "")).isdecimal():
            places[int(place)] = places.get(int(place), 0) + int(sample.value)
    return DraftWork(drafts=drafts, tokens=tokens, accepted=accepted, accepted_at=places)


def prompt_seconds(page: str) -> float | None:
    """How long an engine has computed prompts since its start, one after the other; None: the page does not say."""
    sums = [found[0] for name in PROMPTS if (found := _sums(page, (name,))) is not None]
    return sums[0] if sums else None


def _sums(page: str, names: tuple[str, ...]) -> list[float] | None:
    """The values of some counters, over all engines; None: one is not there."""
    sums: dict[str, float] = {}
    try:
        for sample in _samples(page):
            if sample.name in names:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    except ValueError:
        return None
    return [sums[name] for name in names] if len(sums) == len(names) else None


def _samples(page: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(page):
        yield from family.samples
