"""The arithmetic of a benchmark: from the times of tokens to the figures that are reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
        queued: seconds that the request had to wait for others before it was sent.
        inputs: texts in it.
    """

    start: float
    end: float
    prompt_tokens: int
    output_tokens: int
    chunk_times: Sequence[float] = ()
    first_token: float | None = None
    text: str = ""
    error: str | None = None
    queued: float = 0.0
    inputs: int = 1

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


@dataclass(frozen=True, kw_only=True)
class DraftWork:
    """What a server drafted during a run (speculative decoding).

    Args:
        drafts: how often tokens were drafted.
        tokens, accepted: how many, and how many of them were right.
        accepted_at: how many of them at each place of a draft, from 0.
    """

    drafts: int
    tokens: int
    accepted: int
    accepted_at: Mapping[int, int] = field(default_factory=dict)

    def __sub__(self, before: DraftWork) -> DraftWork:
        places = {place: count - before.accepted_at.get(place, 0) for place, count in self.accepted_at.items()}
        return DraftWork(
            drafts=self.drafts - before.drafts,
            tokens=self.tokens - before.tokens,
            accepted=self.accepted - before.accepted,
            accepted_at=places,
        )

    @property
    def rate(self) -> float:
        """How many of the drafted tokens were right, in percent."""
        return 100 * self.accepted / self.tokens if self.tokens else 0.0

    @property
    def length(self) -> float:
        """Tokens that a draft brought, with the one that comes without it."""
        return 1 + self.accepted / self.drafts if self.drafts else 0.0

    def as_json(self) -> dict[str, Any]:
        """Under the names of vLLM's benchmark."""
        rates = [self.accepted_at[place] / self.drafts for place in sorted(self.accepted_at)] if self.drafts else []
        return {
            "spec_decode_acceptance_rate": self.rate,
            "spec_decode_acceptance_length": self.length,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_draft_tokens": self.tokens,
            "spec_decode_accepted_tokens": self.accepted,
            "spec_decode_per_position_acceptance_rates": rates,
        }


# Of each request: its values, in seconds, under the names of vLLM's benchmark.
LATENCIES = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
DEFAULT_LATENCIES = LATENCIES[:4]
OBJECTIVES = ("ttft", "tpot", "e2el")  # what goodput may be asked of


def latencies_of(record: RequestRecord, name: str) -> Sequence[float | None]:
    """A request's latencies of one kind, in seconds."""
    match name:
        case "ttft":
            return [record.ttft]
        case "tpot":
            return [record.tpot]
        case "itl":
            return record.itls
        case "e2el":
            return [record.latency]
        case "client_queue_time":
            return [record.queued]
        case "e2el_including_client_queue":
            return [record.queued + record.latency]
    raise ValueError(name)


def meets(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Whether a request that succeeded was as fast as wanted; one of a single token has no time between tokens.

    Args:
        objectives: milliseconds at most, by names of ``OBJECTIVES``.
    """
    seen = {name: latencies_of(record, name)[0] for name in objectives}
    none = {"tpot": 0.0, "ttft": float("inf")}
    return all(1000 * (none[name] if (value := seen[name]) is None else value) <= objectives[name] for name in seen)


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
        latencies: those that were asked for, by their names in ``LATENCIES``; None: not seen.
        max_output_tokens_per_s: most output tokens in one second of the run; None: tokens were not seen one by one.
        work: what the engine did, where it can be seen.
        drafts: likewise.
        request_goodput: requests a second that met all objectives; None: there are none.
        total_input_sequences: texts in the requests.
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
    drafts: DraftWork | None = None
    request_goodput: float | None = None
    total_input_sequences: int = 0

    def as_json(self, *, detailed: bool = False) -> dict[str, Any]:
        """The result under the field names of vLLM's benchmarks.

        Args:
            detailed: add the figures and the text of every request.
        """
        fields: dict[str, Any] = {name: getattr(self, name) for name in TOTALS}
        for name, distribution in self.latencies.items():
            if distribution is not None:
                fields |= {f"{key}_{name}_ms": getattr(distribution, key) for key in ("mean", "median", "std")}
                fields |= {f"p{p:g}_{name}_ms": value for p, value in distribution.percentiles.items()}
        if self.work is not None:
            fields |= {"steps": self.work.steps, "compilations": self.work.compilations}
            fields["host_ms_per_step"] = self.work.host_ms_per_step
        fields["request_goodput"] = self.request_goodput
        if self.drafts is not None:
            fields |= self.drafts.as_json()
        if self.total_input_sequences > self.completed:
            fields["total_input_sequences"] = self.total_input_sequences
            per_second = self.total_input_sequences / self.duration if self.duration > 0 else 0.0
            fields["input_sequence_throughput"] = per_second
        fields["errors"] = [record.error for record in self.records if record.error is not None]
        if detailed:
            fields["input_lens"] = [record.prompt_tokens for record in self.records]
            fields["output_lens"] = [record.output_tokens for record in self.records]
            fields["ttfts"] = [record.ttft for record in self.records]
            fields["itls"] = [record.itls for record in self.records]
            fields["latencies"] = [record.latency for record in self.records]
            fields["start_times"] = [record.start for record in self.records]
            fields["queue_times"] = [record.queued for record in self.records]
            fields["generated_texts"] = [record.text for record in self.records]
            fields["errors"] = [record.error or "" for record in self.records]
        return fields


def summarize(
    records: Sequence[RequestRecord],
    *,
    percentiles: Sequence[float] = (99,),
    latencies: Sequence[str] = DEFAULT_LATENCIES,
    objectives: Mapping[str, float] | None = None,
    work: EngineWork | None = None,
    drafts: DraftWork | None = None,
) -> Result:
    """The figures of a run; failed requests count as failed and in nothing else.

    Args:
        records: one a request, in any order.
        percentiles: in (0, 100], which to compute of each latency.
        latencies: which of ``LATENCIES`` to report.
        objectives: what goodput counts; see ``meets``.
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
        latencies={name: milliseconds([v for r in done for v in latencies_of(r, name)]) for name in latencies},
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
        drafts=drafts,
        request_goodput=sum(meets(r, objectives) for r in done) * per_second if objectives else None,
        total_input_sequences=sum(r.inputs for r in done),
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
