"""Output for the person who starts an engine: a table of sizes at the start, and a regular line of throughput."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from llmjax.engine.core.stats import RequestStats, StepStats
from llmjax.engine.info import EngineInfo, ProgramInfo

logger = logging.getLogger(__name__)

LOG_INTERVAL = 10.0  # seconds


def startup_table(info: EngineInfo, programs: Sequence[ProgramInfo]) -> Table:
    """Weights, KV cache, longest contexts, and the step programs compiled so far."""
    table = Table(title=f"llmjax on {info.platform}: {info.device}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    if info.slow is not None:
        table.add_row("slow", info.slow, style="yellow")
    table.add_row("model", f"{info.architecture}, {info.num_layers} layers, {info.dtype} weights")
    if info.kernels is not None:
        table.add_row("kernels", info.kernels)
    host = f", {_size(info.offloaded_bytes)} of them in the host's memory" if info.offloaded_bytes else ""
    table.add_row("weights", f"{_size(info.weight_bytes)}{host}, loaded in {info.load_seconds:.1f} s")
    if info.dequantized_from:
        why = f"{info.platform} has no kernels for it; --quantization stored keeps it"
        table.add_row("", f"dequantized from {info.dequantized_from}: {why}")
    if info.activations:
        table.add_row("activations", info.activations)
    scales = " with calibrated scales" if info.kv_calibrated else ""
    table.add_row(
        "KV cache",
        f"{_size(info.kv_bytes)}: {info.kv_tokens:,} tokens in pages of {info.page_size}, {info.kv_dtype}{scales}",
    )
    if taken := [program.num_bytes for program in programs if program.num_bytes is not None]:
        table.add_row(
            "steps",
            f"{_size(info.sampler_bytes)} of sampler state, at most {_size(max(taken))} of temporaries, outputs and "
            "code",
        )
    table.add_row("one step", f"at most {info.max_num_seqs:,} sequences and {info.max_num_batched_tokens:,} tokens")
    contexts = ", ".join(f"{n} × {tokens:,}" for n, tokens in info.longest_contexts.items())
    table.add_row("longest contexts", f"{contexts} tokens")
    for family, decode in (("decode steps", True), ("mixed steps", False)):
        sizes = [str(program.tokens) for program in programs if program.decode is decode]
        table.add_row(family, f"{', '.join(sizes)} {'rows' if decode else 'tokens'}")
    ready = [
        f"{'decode' if program.decode else 'mixed'} {program.tokens} {program.seconds:.1f} s"
        for program in programs
        if program.seconds is not None
    ]
    table.add_row("compiled", f"{len(ready)} of {len(programs)}: {', '.join(ready) or 'none yet'}")
    return table


def print_startup(info: EngineInfo, programs: Sequence[ProgramInfo]) -> None:
    """Prints the table to stderr, so that generated text keeps stdout for itself."""
    Console(stderr=True).print(startup_table(info, programs))


class ThroughputLog:
    """A line every ten seconds in which something happened, in vLLM's words."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._prompt = self._generated = self._queries = self._hits = 0
        self._last: dict[int, StepStats] = {}  # by engine

    def record_step(self, stats: StepStats) -> None:
        self._last[stats.engine] = stats
        self._prompt += stats.num_prompt_tokens
        self._generated += stats.num_generation_tokens
        self._queries += stats.prefix_cache_queries
        self._hits += stats.prefix_cache_hits
        elapsed = time.monotonic() - self._since
        if elapsed < LOG_INTERVAL:
            return
        last = self._last.values()
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            self._prompt / elapsed,
            self._generated / elapsed,
            sum(step.num_running for step in last),
            sum(step.num_waiting for step in last),
            100 * sum(step.kv_usage for step in last) / len(last),
            100 * self._hits / self._queries if self._queries else 0.0,
        )
        self._since = time.monotonic()
        self._prompt = self._generated = self._queries = self._hits = 0

    def record_request(self, stats: RequestStats) -> None:
        pass

    def record_rejection(self, reason: str) -> None:
        pass


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
