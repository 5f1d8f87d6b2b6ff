"""The engine's statistics: per step, per finished request, and since the start."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Protocol

from llmjax.engine.core.request import SequenceTimes


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """CPU seconds of the engine's thread, by activity. Waiting for the device takes none."""

    plan: float = 0.0  # which tokens of which sequences
    send: float = 0.0  # packing the batch and starting its program
    read: float = 0.0  # what the dispatch before has sampled
    deliver: float = 0.0  # tokens to sequences, outputs and counts

    @property
    def total(self) -> float:
        return self.plan + self.send + self.read + self.deliver

    def __add__(self, other: HostTime) -> HostTime:
        return HostTime(
            plan=self.plan + other.plan,
            send=self.send + other.send,
            read=self.read + other.read,
            deliver=self.deliver + other.deliver,
        )


class HostClock:
    """Adds up what the parts of steps take, by their names in `HostTime`."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._started = 0.0

    def start(self) -> None:
        """Begins to measure a part of a step."""
        self._started = time.thread_time()

    def lap(self, name: str) -> None:
        """Ends the part, and begins to measure the next one."""
        now = time.thread_time()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._started
        self._started = now

    def take(self) -> HostTime:
        """The sums since the last call."""
        taken, self._laps = self._laps, {}
        return HostTime(**taken)


@dataclass
class TokenTimes:
    """When the tokens of a dispatch came, in seconds of time.monotonic(), and how many of each row."""

    now: float
    first_tokens: list[float] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def take(self, times: SequenceTimes, count: int) -> None:
        """Notes ``count`` tokens of a sequence; those of one dispatch share the time since the one before."""
        self.counts.append(count)
        if not count:
            return
        last = times.last_token
        if last is None:
            times.first_token = last = self.now
            self.first_tokens.append(self.now - times.arrival)
            count -= 1
        times.last_token = self.now
        if count == 1:
            self.inter_token.append(self.now - last)
        elif count:
            self.inter_token += [(self.now - last) / count] * count


@dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """How many drafts were right."""

    num_drafts: int = 0  # guesses, of one token or several
    num_draft_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)  # draft tokens that were right, by place in their guess

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_pos)


@dataclass(frozen=True, kw_only=True)
class OffloadCounts:
    """Pages between the device, the host's memory and its disk. Hits in tokens, the rest in bytes."""

    host_hits: int = 0  # prompt tokens whose pages were in host memory
    disk_hits: int = 0  # on disk
    remote_hits: int = 0  # and at another server
    device_to_host_bytes: int = 0
    host_to_device_bytes: int = 0
    disk_write_bytes: int = 0
    disk_read_bytes: int = 0
    remote_read_bytes: int = 0
    disk_dropped_bytes: int = 0  # not written because the disk is too slow

    def __add__(self, other: OffloadCounts) -> OffloadCounts:
        return OffloadCounts(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One dispatch. Times in seconds."""

    engine: int = 0  # the number of the engine that it ran on
    num_running: int
    num_waiting: int
    kv_usage: float  # share of the pages that are held, 0 to 1
    step_tokens: list[int]  # prompt tokens computed and tokens sampled in each pass through the model
    num_prompt_tokens: int  # computed
    num_generation_tokens: int  # sampled tokens that reached the host
    prefix_cache_queries: int = 0  # prompt tokens of sequences admitted in this step
    prefix_cache_hits: int = 0  # of those, found in the cache
    image_queries: int = 0  # images that sequences have asked for
    image_hits: int = 0  # of those, encoded before
    num_preempted: int = 0
    running_adapters: list[str] = field(default_factory=list)  # names, each once
    waiting_adapters: list[str] = field(default_factory=list)
    compilations: int = 0
    host: HostTime = HostTime()
    drafts: DraftCounts = field(default_factory=DraftCounts)
    offload: OffloadCounts = OffloadCounts()
    step_seconds: float = 0.0  # from one dispatch's tokens to the next one's
    time_to_first_tokens: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Passes through the model."""
        return len(self.step_tokens)


@dataclass(frozen=True, kw_only=True)
class RequestStats:
    """One finished request. Times in seconds."""

    engine: int = 0  # the number of the engine that it went to
    request_id: str
    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int  # over all continuations
    num_cached_tokens: int
    max_tokens: int | None
    n: int
    num_preemptions: int
    e2e_seconds: float
    queued_seconds: float  # arrival to first scheduled
    prefill_seconds: float  # first scheduled to first token
    decode_seconds: float  # first token to last
    inference_seconds: float  # first scheduled to last token


QUEUE_FULL = "max_num_queued_reqs"
FORMS_FULL = "structured_output_checks"
REJECTIONS = (QUEUE_FULL, FORMS_FULL)  # the limits that requests are refused by, for now


class StatLogger(Protocol):
    """Receives the counts: steps on the engine's thread (of several engines, on one at a time), the rest on its users'.
    Be quick, do not block or raise."""

    def record_step(self, stats: StepStats) -> None: ...

    def record_request(self, stats: RequestStats) -> None: ...

    def record_rejection(self, reason: str) -> None: ...


@dataclass
class EngineTotals:
    """Sums since the start, for benchmarks and the log line."""

    dispatches: int = 0
    steps: int = 0
    host: HostTime = HostTime()
    compilations: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    offload: OffloadCounts = OffloadCounts()
    finished_requests: int = 0
    rejections: int = 0

    def record_step(self, stats: StepStats) -> None:
        self.dispatches += 1
        self.steps += stats.num_steps
        self.host += stats.host
        self.compilations += stats.compilations
        self.prompt_tokens += stats.num_prompt_tokens
        self.generation_tokens += stats.num_generation_tokens
        self.preemptions += stats.num_preempted
        self.draft_tokens += stats.drafts.num_draft_tokens
        self.accepted_tokens += stats.drafts.num_accepted_tokens
        self.prefix_cache_queries += stats.prefix_cache_queries
        self.prefix_cache_hits += stats.prefix_cache_hits
        self.offload += stats.offload

    def record_request(self, stats: RequestStats) -> None:
        self.finished_requests += 1

    def record_rejection(self, reason: str) -> None:
        self.rejections += 1


@dataclass(frozen=True)
class KVStats:
    """Pages by state, summed over groups; ``free + cached + used == total``."""

    free: int
    cached: int
    used: int
    total: int

    @property
    def usage(self) -> float:
        return self.used / self.total
