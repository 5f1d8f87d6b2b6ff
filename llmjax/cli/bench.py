"""``llmjax bench``: picks the benchmark."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from llmjax.errors import ConfigError
from llmjax.settings import nearest


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: the module whose ``main(argv)`` runs it, and its line of help."""

    module: str
    help: str


BENCHMARKS = {
    "latency": Benchmark("llmjax.bench.latency", "time batches of equal requests, one batch after the other"),
    "throughput": Benchmark("llmjax.bench.throughput", "time many prompts through the engine in this process"),
    "serve": Benchmark("llmjax.bench.serve", "send requests to a server over HTTP and time the streams"),
}


def main(argv: list[str]) -> int:
    """Runs a benchmark.

    Raises:
        LLMJaxError: a setting is wrong, or the run fails.
    """
    if not argv or argv[0] in ("--help", "-h"):
        print("usage: llmjax bench BENCHMARK [options]\n")
        print("\n".join(f"  {name:<12} {benchmark.help}" for name, benchmark in BENCHMARKS.items()))
        print("\nllmjax bench BENCHMARK --help describes its options.")
        return 0 if argv else 1
    name, *rest = argv
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}{nearest(name, BENCHMARKS)} ({', '.join(BENCHMARKS)})")
    return int(importlib.import_module(BENCHMARKS[name].module).main(rest))
