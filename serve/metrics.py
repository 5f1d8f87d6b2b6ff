"""Prometheus metrics under vLLM's names and labels, because dashboards and autoscalers read those.

Numbers are kept in plain lists and turned into metric families when scraped: the engine's thread records a latency
per token and step, and prometheus_client's own histograms would cost it ten times as much.
Bucket bounds are vLLM's, so that its dashboards' quantiles stay comparable.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar, get_args

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from llmjax.engine.core.stats import REJECTIONS, OffloadCounts, RequestStats, StepStats
from llmjax.engine.info import SleepState
from llmjax.engine.need import MEMORY
from llmjax.outputs import REPETITION
from llmjax.serve.interfaces import Engine
from llmjax.serve.models import State
from llmjax.serve.several import state_of

if TYPE_CHECKING:
    from llmjax.several.pool import ModelPool

LABELS = ("model_name", "engine")

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)

TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN_LATENCY = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)


def one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … up to ``limit``."""
    bounds = (digit * 10**power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= limit)


class Histogram:
    """Counts per bucket and the sum. One thread writes; a reader may see a value more or less."""

    def __init__(self, help: str, bounds: Iterable[float]) -> None:
        self.help = help
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, *values: float) -> None:
        for value in values:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and how many values are at or below it."""
        total = 0.0
        pairs = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            pairs.append((floatToGoString(bound), total))
        return pairs


GAUGES = {
    "num_requests_running": "Requests in the current step.",
    "num_requests_waiting": "Requests waiting for their first step, or preempted.",
    "kv_cache_usage_perc": "Share of the KV pages that are held; 1 means all.",
}

COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Requests put back to the queue because KV pages ran out.",
    "prompt_tokens": "Prompt tokens computed.",
    "prompt_tokens_cached": "Prompt tokens of finished requests that came from the prefix cache.",
    "generation_tokens": "Tokens generated.",
}

DRAFT_COUNTERS = {
    "spec_decode_num_drafts": "Drafts, of one token or several.",
    "spec_decode_num_draft_tokens": "Draft tokens that steps have verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were right.",
}

EXTERNAL_COUNTERS = {
    "external_prefix_cache_queries": "Prompt tokens that had no pages on the device.",
    "external_prefix_cache_hits": "Of those, found in host memory, on disk or at another server.",
}

# What vLLM says of every model, those of texts too.
MEDIA_COUNTERS = {
    "mm_cache_queries": "Images looked up among those that are encoded; text models have none.",
    "mm_cache_hits": "Of those, found.",
}

OWN_COUNTERS = {
    "steps": "Passes through the model.",
    "dispatches": "Device programs started; one may take several decode steps.",
    "compilations": "Programs compiled after the start; more than a few mean missing warm-up.",
    "step_host_seconds": "CPU seconds of the engine's thread.",
}


SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")  # vLLM's names of where prompt tokens come from

OFFLOAD_HITS = {"host": "host_hits", "disk": "disk_hits", "remote": "remote_hits"}
OFFLOAD_BYTES = {  # by vLLM's names of where from and to
    "GPU_to_CPU": "device_to_host_bytes",
    "CPU_to_GPU": "host_to_device_bytes",
    "CPU_to_disk": "disk_write_bytes",
    "disk_to_CPU": "disk_read_bytes",
    "remote_to_CPU": "remote_read_bytes",
    "dropped": "disk_dropped_bytes",
}


def _histograms(max_model_len: int) -> dict[str, Histogram]:
    tokens = one_two_five(max_model_len)
    return {
        "iteration_tokens_total": Histogram("Tokens computed per step.", STEP_TOKENS),
        "time_to_first_token_seconds": Histogram("Arrival to first token.", TTFT),
        "inter_token_latency_seconds": Histogram("Between two tokens of a sequence.", TOKEN_LATENCY),
        "request_time_per_output_token_seconds": Histogram("Mean per request, the first token apart.", TOKEN_LATENCY),
        "e2e_request_latency_seconds": Histogram("Arrival to last token.", REQUEST_LATENCY),
        "request_queue_time_seconds": Histogram("Arrival to first step.", REQUEST_LATENCY),
        "request_inference_time_seconds": Histogram("First step to last token.", REQUEST_LATENCY),
        "request_prefill_time_seconds": Histogram("First step to first token.", REQUEST_LATENCY),
        "request_decode_time_seconds": Histogram("First to last token.", REQUEST_LATENCY),
        "request_prompt_tokens": Histogram("Prompt tokens per request.", tokens),
        "request_generation_tokens": Histogram("Generated tokens per request.", tokens),
        "request_max_num_generation_tokens": Histogram("Most tokens that a continuation was allowed.", tokens),
        "request_params_max_tokens": Histogram("max_tokens per request.", tokens),
        "request_params_n": Histogram("n per request.", CHOICES),
        "request_num_preemptions": Histogram("Preemptions per request.", PREEMPTIONS),
        "request_prefill_kv_computed_tokens": Histogram("Prompt tokens computed per request.", tokens),
    }


class _Numbers:
    """What one engine has been heard of."""

    def __init__(self, max_model_len: int) -> None:
        self.gauges = dict.fromkeys(GAUGES, 0.0)
        self.counters = dict.fromkeys(
            (*COUNTERS, *DRAFT_COUNTERS, *EXTERNAL_COUNTERS, *MEDIA_COUNTERS, *OWN_COUNTERS), 0.0
        )
        self.accepted_per_pos = Counter[int]()
        self.sources = Counter[str](dict.fromkeys(SOURCES, 0))
        self.offload = OffloadCounts()
        self.adapters: tuple[list[str], list[str]] = ([], [])  # names of those that run, and that wait
        self.finished = Counter[str]({"stop": 0, "length": 0, "abort": 0, "error": 0, REPETITION: 0})
        self.histograms = _histograms(max_model_len)


class EngineMetrics(Collector):
    """A ``StatLogger`` and the Prometheus collector of what it was told, by engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._model = engine.info.model_name
        self._cache_config = {
            "block_size": str(engine.config.page_size),
            "cache_dtype": engine.config.kv_cache_dtype,
            "enable_prefix_caching": str(engine.config.enable_prefix_caching),
            "gpu_memory_utilization": str(engine.config.gpu_memory_utilization),
            "num_gpu_blocks": str(engine.info.kv_tokens // engine.info.page_size),
        }
        self._drafts = engine.info.drafts
        self._offloads = engine.config.kv_offloading_size > 0 or engine.config.kv_transfer is not None
        self._slots = engine.config.adapter_slots
        self._max_model_len = engine.info.max_model_len
        self._rejected = Counter[str](dict.fromkeys(REJECTIONS, 0))
        self._engines = [_Numbers(self._max_model_len) for _ in engine.states]

    def attach(self, engine: Engine) -> None:
        """Goes on counting with an engine that has been loaded in place of the one before."""
        self._engine = engine

    def record_step(self, stats: StepStats) -> None:
        numbers = self._engines[stats.engine]
        numbers.gauges["num_requests_running"] = stats.num_running
        numbers.gauges["num_requests_waiting"] = stats.num_waiting
        numbers.gauges["kv_cache_usage_perc"] = stats.kv_usage
        numbers.adapters = (stats.running_adapters, stats.waiting_adapters)
        counters = numbers.counters
        counters["prefix_cache_queries"] += stats.prefix_cache_queries
        counters["mm_cache_queries"] += stats.image_queries
        counters["mm_cache_hits"] += stats.image_hits
        counters["prefix_cache_hits"] += stats.prefix_cache_hits
        counters["num_preemptions"] += stats.num_preempted
        counters["prompt_tokens"] += stats.num_prompt_tokens
        counters["generation_tokens"] += stats.num_generation_tokens
        counters["spec_decode_num_drafts"] += stats.drafts.num_drafts
        counters["spec_decode_num_draft_tokens"] += stats.drafts.num_draft_tokens
        counters["spec_decode_num_accepted_tokens"] += stats.drafts.num_accepted_tokens
        numbers.accepted_per_pos.update(dict(enumerate(stats.drafts.accepted_per_pos)))
        external = stats.offload.host_hits + stats.offload.disk_hits + stats.offload.remote_hits
        if self._offloads:
            missing = stats.prefix_cache_queries - stats.prefix_cache_hits
            counters["external_prefix_cache_queries"] += missing + external
        counters["external_prefix_cache_hits"] += external
        taken = (stats.num_prompt_tokens, stats.prefix_cache_hits - external, external)
        numbers.sources.update(dict(zip(SOURCES, taken, strict=True)))
        numbers.offload += stats.offload
        counters["dispatches"] += 1
        counters["steps"] += stats.num_steps
        counters["compilations"] += stats.compilations
        counters["step_host_seconds"] += stats.host.total
        numbers.histograms["iteration_tokens_total"].observe(*stats.step_tokens)
        numbers.histograms["time_to_first_token_seconds"].observe(*stats.time_to_first_tokens)
        numbers.histograms["inter_token_latency_seconds"].observe(*stats.inter_token_latencies)

    def record_request(self, stats: RequestStats) -> None:
        numbers = self._engines[stats.engine]
        numbers.finished[stats.finish_reason] += 1
        numbers.counters["prompt_tokens_cached"] += stats.num_cached_tokens
        per_choice = stats.num_generation_tokens / stats.n
        longest = self._max_model_len - stats.num_prompt_tokens
        seen = {
            "e2e_request_latency_seconds": stats.e2e_seconds,
            "request_queue_time_seconds": stats.queued_seconds,
            "request_inference_time_seconds": stats.inference_seconds,
            "request_prefill_time_seconds": stats.prefill_seconds,
            "request_decode_time_seconds": stats.decode_seconds,
            "request_prompt_tokens": stats.num_prompt_tokens,
            "request_generation_tokens": stats.num_generation_tokens,
            "request_max_num_generation_tokens": longest if stats.max_tokens is None else stats.max_tokens,
            "request_params_n": stats.n,
            "request_num_preemptions": stats.num_preemptions,
            "request_prefill_kv_computed_tokens": stats.num_prompt_tokens - stats.num_cached_tokens,
        }
        if stats.max_tokens is not None:
            seen["request_params_max_tokens"] = stats.max_tokens
        if per_choice > 1:
            seen["request_time_per_output_token_seconds"] = stats.decode_seconds / (per_choice - 1)
        for name, value in seen.items():
            numbers.histograms[name].observe(value)

    def record_rejection(self, reason: str) -> None:
        self._rejected[reason] += 1

    def collect(self) -> Iterator[Metric]:
        states = self._engine.states
        for number, state in enumerate(states):
            if not state.serving:  # it cannot say that it does nothing
                self._engines[number].gauges = dict.fromkeys(GAUGES, 0.0)
                self._engines[number].adapters = ([], [])
        # Requests that wait for a paused server have not reached any engine yet.
        deferred = [self._engine.num_held_back, *[0] * (len(self._engines) - 1)]
        for name, help in GAUGES.items():
            more = deferred if name == "num_requests_waiting" else [0] * len(deferred)
            values = [numbers.gauges[name] + extra for numbers, extra in zip(self._engines, more, strict=True)]
            yield self._gauge(f"vllm:{name}", help, values)
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests: for capacity, or deferred by a pause.",
            labels=(*LABELS, "reason"),
        )
        for (labels, numbers), held_back in zip(self._labelled(), deferred, strict=True):
            waiting.add_metric([*labels, "capacity"], numbers.gauges["num_requests_waiting"])
            waiting.add_metric([*labels, "deferred"], held_back)
        yield waiting
        shown = {**COUNTERS, **EXTERNAL_COUNTERS, **MEDIA_COUNTERS, **(DRAFT_COUNTERS if self._drafts else {})}
        for prefix, table in (("vllm", shown), ("llmjax", OWN_COUNTERS)):
            for name, help in table.items():
                yield self._counter(f"{prefix}:{name}", help, [numbers.counters[name] for numbers in self._engines])
        if self._drafts:
            per_pos = CounterMetricFamily(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Draft tokens that were right, by their position in the draft.",
                labels=(*LABELS, "position"),
            )
            for labels, numbers in self._labelled():
                for position in range(self._drafts):
                    per_pos.add_metric([*labels, str(position)], numbers.accepted_per_pos[position])
            yield per_pos
        if self._offloads:
            yield from self._offloading()
        if self._slots:
            yield self._adapters()
        yield self._gauge("llmjax:engine_up", "1 where the engine takes requests.", [s.serving for s in states])
        yield self._counter(
            "llmjax:engine_restarts",
            "Times that another process took a dead engine's place.",
            [s.restarts for s in states],
        )
        sleeps = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 at the state that the engine is in.", labels=(*LABELS, "sleep_state")
        )
        for labels, _ in self._labelled():
            for state in get_args(SleepState):
                sleeps.add_metric([*labels, state], state == self._engine.sleep_state)
        yield sleeps
        success = CounterMetricFamily("vllm:request_success", "Finished requests.", labels=(*LABELS, "finished_reason"))
        for labels, numbers in self._labelled():
            for reason, count in dict(numbers.finished).items():
                success.add_metric([*labels, reason], count)
        yield success
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they come from.", labels=(*LABELS, "source")
        )
        for labels, numbers in self._labelled():
            for source, count in dict(numbers.sources).items():
                sources.add_metric([*labels, source], count)
        yield sources
        rejections = CounterMetricFamily(
            "vllm:admission_rejections",
            "Requests refused with 503, by the limit they met; no engine has seen them, so all count for the first.",
            labels=(*LABELS, "reason"),
        )
        for reason, count in dict(self._rejected).items():
            rejections.add_metric([self._model, "0", reason], count)
        yield rejections
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's settings.", labels=(*LABELS, *self._cache_config)
        )
        for number in range(len(self._engines)):
            cache.add_metric([self._model, str(number), *self._cache_config.values()], 1)
        yield cache
        for name, histogram in self._engines[0].histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", histogram.help, labels=LABELS)
            for labels, numbers in self._labelled():
                counts = numbers.histograms[name]
                family.add_metric(labels, counts.buckets(), counts.sum)
            yield family

    def _adapters(self) -> Metric:
        """The adapters of all engines together; its value is the time, as vLLM has it."""
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "The time, with the names of adapters that run and that wait.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        named = [sorted({name for numbers in self._engines for name in numbers.adapters[at]}) for at in (0, 1)]
        family.add_metric([str(self._slots), *(",".join(names) for names in named)], time.time())
        return family

    def _offloading(self) -> Iterator[Metric]:
        """What was found, and moved, beyond the device."""
        for name, help, label, values in (
            ("llmjax:kv_offload_hits", "Prompt tokens found, by where their pages were.", "tier", OFFLOAD_HITS),
            ("vllm:kv_offload_total_bytes", "Bytes of KV pages moved.", "transfer_type", OFFLOAD_BYTES),
        ):
            family = CounterMetricFamily(name, help, labels=(*LABELS, label))
            for labels, numbers in self._labelled():
                for value, field in values.items():
                    family.add_metric([*labels, value], getattr(numbers.offload, field))
            yield family

    def _labelled(self) -> Iterator[tuple[list[str], _Numbers]]:
        """Each engine's numbers with the labels of all its metrics."""
        for number, numbers in enumerate(self._engines):
            yield [self._model, str(number)], numbers

    def _gauge(self, name: str, help: str, values: Iterable[float]) -> GaugeMetricFamily:
        return _by_engine(GaugeMetricFamily(name, help, labels=LABELS), self._model, values)

    def _counter(self, name: str, help: str, values: Iterable[float]) -> CounterMetricFamily:
        return _by_engine(CounterMetricFamily(name, help, labels=LABELS), self._model, values)


def _by_engine(family: Family, model: str, values: Iterable[float]) -> Family:
    """The family with a value for each engine."""
    for number, value in enumerate(values):
        family.add_metric([model, str(number)], value)
    return family


class PoolMetrics(Collector):
    """The metrics of several models: those of each one's engines, and what becomes of the models.

    Args:
        pool: has the models.
    """

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self._engines: dict[str, EngineMetrics] = {}

    def attach(self, engine: Engine) -> None:
        """Counts what an engine does that has just been loaded."""
        name = engine.info.model_name
        if name in self._engines:
            self._engines[name].attach(engine)
        else:
            self._engines[name] = EngineMetrics(engine)
        engine.add_stat_logger(self._engines[name])

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metrics in self._engines.values():
            for family in metrics.collect():
                if family.name in families:
                    families[family.name].samples.extend(family.samples)
                else:
                    families[family.name] = family
        yield from families.values()
        models = self._pool.models.values()
        state = GaugeMetricFamily(
            "llmjax:model_state", "1 at the state that a model of several is in.", labels=("model_name", "state")
        )
        for model in models:
            for name in get_args(State):
                state.add_metric([model.name, name], state_of(model) == name)
        yield state
        held = GaugeMetricFamily("llmjax:model_memory_bytes", "Memory that a model may take.", labels=["model_name"])
        waiting = GaugeMetricFamily(
            "llmjax:model_requests_waiting", "Requests that wait for a model to be loaded.", labels=["model_name"]
        )
        for model in models:
            held.add_metric([model.name], model.held.get(MEMORY, 0))
            waiting.add_metric([model.name], model.waiting)
        yield from (held, waiting)
        for kind, help in (
            ("loads", "Times that a model was loaded."),
            ("unloads", "Times that a model was unloaded."),
            ("failures", "Times that a model could not be loaded, or its engine died."),
        ):
            counts = CounterMetricFamily(f"llmjax:model_{kind}", help, labels=["model_name"])
            for model in models:
                counts.add_metric([model.name], getattr(model, kind))
            yield counts


def registry(metrics: Collector) -> CollectorRegistry:
    """The metrics of the models, and the usual ones of a Python process."""
    collectors = CollectorRegistry()
    collectors.register(metrics)
    ProcessCollector(registry=collectors)
    PlatformCollector(registry=collectors)
    return collectors
