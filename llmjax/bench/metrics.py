"""The arithmetic of a benchmark: from the times of tokens to the figures that are reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """What was seen of one request. Times are seconds of one clock.

    Args:
        start: when it was sent.
        end: when its last output came, or its error.
        prompt_tokens, output_tokens: as counted by the engine.
        chunk_times: when each piece of output came; empty where only the ends were seen.
        first_token: when the first output came; None: the first chunk.
        text: the output.
        error: why it failed; None: it did not.
    """

    start: float
    end: float
    prompt_tokens: int
    output_tokens: int
    chunk_times: Sequence[float] = ()
    first_token: float | None = None
    text: str = ""
    error: str | None = None

    @property
    def latency(self) -> float:
        return self.end - self.start

    @property
    def ttft(self) -> float | None:
        """Time to the first token."""
        first = self.first_token if self.first_token is not None else next(iter(self.chunk_times), None)
        return None if first is None else first - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (latency - TTFT) / (output tokens - 1)."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: the times between neighboring pieces of output."""
        return [later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Mean, median, population standard deviation and percentiles (linear interpolation) of some values."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]

    @staticmethod
    def of(values: Sequence[float], percentiles: Sequence[float] = (99,)) -> Distribution | None:
        """The distribution of the values, in their unit; None of no values."""
        if not values:
            return None
        array = np.asarray(values, np.float64)
        return Distribution(
            mean=float(array.mean()),
            median=float(np.median(array)),
            std=float(array.std()),
            percentiles={p: float(np.percentile(array, p)) for p in percentiles},
        )


@dataclass(frozen=True, kw_only=True)
class EngineWork:
    """What the engine did during a run.

    Args:
        steps: how many steps it took.
        host_seconds: CPU time of the engine thread in them.
        compilations: programs compiled.
    """

    steps: int
    host_seconds: float
    compilations: int

    @property
    def host_ms_per_step(self) -> float | None:
        return 1000 * self.host_seconds / self.steps if self.steps else None

    def __sub__(self, before: EngineWork) -> EngineWork:
        return EngineWork(
            steps=self.steps - before.steps,
            host_seconds=self.host_seconds - before.host_seconds,
            compilations=self.compilations - before.compilations,
        )


TOTALS = (
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of one run; latencies in milliseconds, throughputs per second.

    Args:
        duration: seconds from the first request to the last output.
        latencies: TTFT, TPOT, ITL and end-to-end, by the short names ttft, tpot, itl, e2el; None: not seen.
        max_output_tokens_per_s: most output tokens in one second of the run; None: tokens were not seen one by one.
        work: what the engine did, where it can be seen.
    """

    records: Sequence[RequestRecord]
    duration: float
    latencies: Mapping[str, Distribution | None]
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float | None
    max_concurrent_requests: int
    work: EngineWork | None = None

    def as_json(self, *, detailed: bool = False) -> dict[str, Any]:
        """The result under the field names of vLLM's benchmarks.

        Args:
            detailed: with the figures and the text of every request.
        """
        fields: dict[str, Any] = {name: getattr(self, name) for name in TOTALS}
        for name, distribution in self.latencies.items():
            if distribution is not None:
                fields |= {f"{key}_{name}_ms": getattr(distribution, key) for key in ("mean", "median", "std")}
                fields |= {f"p{p:g}_{name}_ms": value for p, value in distribution.percentiles.items()}
        if self.work is not None:
            fields |= {"steps": self.work.steps, "compilations": self.work.compilations}
            fields["host_ms_per_step"] = self.work.host_ms_per_step
        fields["errors"] = [record.error for record in self.records if record.error is not None]
        if detailed:
            fields["input_lens"] = [record.prompt_tokens for record in self.records]
            fields["output_lens"] = [record.output_tokens for record in self.records]
            fields["ttfts"] = [record.ttft for record in self.records]
            fields["itls"] = [record.itls for record in self.records]
            fields["generated_texts"] = [record.text for record in self.records]
            fields["errors"] = [record.error or "" for record in self.records]
        return fields


def summarize(
    records: Sequence[RequestRecord], *, percentiles: Sequence[float] = (99,), work: EngineWork | None = None
) -> Result:
    """The figures of a run; failed requests count as failed and in nothing else.

    Args:
        records: one a request, in any order.
        percentiles: in (0, 100], which to compute of each latency.
    """
    done = [record for record in records if record.error is None]
    duration = max((r.end for r in records), default=0.0) - min((r.start for r in records), default=0.0)

    def milliseconds(values: Sequence[float | None]) -> Distribution | None:
        return Distribution.of([1000 * value for value in values if value is not None], percentiles)

    inputs, outputs = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    per_second = 1 / duration if duration > 0 else 0.0
    return Result(
        records=records,
        duration=duration,
        latencies={
            "ttft": milliseconds([r.ttft for r in done]),
            "tpot": milliseconds([r.tpot for r in done]),
            "itl": milliseconds([itl for r in done for itl in r.itls]),
            "e2el": milliseconds([r.latency for r in done]),
        },
        completed=len(done),
        failed=len(records) - len(done),
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        request_throughput=len(done) * per_second,
        output_throughput=outputs * per_second,
        total_token_throughput=(inputs + outputs) * per_second,
        max_output_tokens_per_s=_peak_rate(done),
        max_concurrent_requests=_peak_concurrency(done),
        work=work,
    )


def _peak_rate(records: Sequence[RequestRecord]) -> float | None:
    """Most tokens in one second counted from the start; a piece of several tokens counts them evenly."""
    times = [(time, r.output_tokens / len(r.chunk_times)) for r in records for time in r.chunk_times]
    if not times:
        return None
    start = min(r.start for r in records)
    seconds = np.asarray([int(time - start) for time, _ in times])
    return float(np.bincount(seconds, weights=[tokens for _, tokens in times]).max())


def _peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests under way at one moment; one that ends as another starts is not under way any more."""
    events = sorted([(r.start, 1) for r in records] + [(r.end, -1) for r in records])
    return int(max(np.cumsum([change for _, change in events]), default=0))
