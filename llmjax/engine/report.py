"""What a person wants to know at start: the table of sizes, and a line of throughput now and then."""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.table import Table

from llmjax.engine.engine import Engine
from llmjax.engine.memory import ProgramMemory
from llmjax.engine.stats import RequestStats, StepStats
from llmjax.kernels.cpu.library import describe

logger = logging.getLogger(__name__)

LOG_INTERVAL = 10.0  # seconds


def startup_table(engine: Engine) -> Table:
    """Weights, KV cache, longest contexts, and the step programs compiled so far."""
    plan, model, config = engine.kv_plan, engine.model, engine.model.config
    table = Table(title=f"llmjax on {engine.platform.device}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("model", f"{config.architecture}, {config.num_layers} layers, {engine.platform.dtype} weights")
    if engine.platform.is_cpu:
        table.add_row("kernels", describe())
    host = f", {_size(model.offloaded_bytes)} of them in the host's memory" if model.offloaded_bytes else ""
    table.add_row("weights", f"{_size(model.num_bytes)}{host}, loaded in {model.load_seconds:.1f} s")
    scales = " with calibrated scales" if model.kv_calibration is not None else ""
    table.add_row(
        "KV cache",
        f"{_size(plan.num_bytes)}: {plan.num_tokens:,} tokens in pages of {plan.page_size}, "
        f"{plan.layout.dtype.name}{scales}",
    )
    ready = engine.runner.programs.ready
    if taken := [memory.total for program in ready if (memory := ProgramMemory.of(program.executable))]:
        sampler = _size(engine.runner.sampler_bytes)
        table.add_row(
            "steps", f"{sampler} of sampler state, at most {_size(max(taken))} of temporaries, outputs and code"
        )
    contexts = ", ".join(f"{n} × {plan.longest_context(n):,}" for n in (1, 2, 4, 8) if n <= engine.config.max_num_seqs)
    table.add_row("longest contexts", f"{contexts} tokens")
    for family, decode in (("decode steps", True), ("mixed steps", False)):
        buckets = [b for b in engine.runner.programs.buckets if b.decode is decode]
        unit = "rows" if decode else "tokens"
        table.add_row(family, ", ".join(str(bucket.tokens) for bucket in buckets) + f" {unit}")
    times = ", ".join(f"{_name(p.bucket.tokens, p.bucket.decode)} {p.seconds:.1f} s" for p in ready) or "none yet"
    table.add_row("compiled", f"{len(ready)} of {len(engine.runner.programs.buckets)}: {times}")
    return table


def print_startup(engine: Engine) -> None:
    """Prints the table to stderr, so that generated text keeps stdout for itself."""
    Console(stderr=True).print(startup_table(engine))


class ThroughputLog:
    """A line every ten seconds in which something happened, in vLLM's words."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._prompt = self._generated = self._queries = self._hits = 0

    def record_step(self, stats: StepStats) -> None:
        self._prompt += stats.num_prompt_tokens
        self._generated += stats.num_generation_tokens
        self._queries += stats.prefix_cache_queries
        self._hits += stats.prefix_cache_hits
        elapsed = time.monotonic() - self._since
        if elapsed < LOG_INTERVAL:
            return
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            self._prompt / elapsed,
            self._generated / elapsed,
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_usage,
            100 * self._hits / self._queries if self._queries else 0.0,
        )
        self._since = time.monotonic()
        self._prompt = self._generated = self._queries = self._hits = 0

    def record_request(self, stats: RequestStats) -> None:
        pass

    def record_rejection(self, reason: str) -> None:
        pass


def _name(tokens: int, decode: bool) -> str:
    return f"{'decode' if decode else 'mixed'} {tokens}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
