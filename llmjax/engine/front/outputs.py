"""Request outputs made from engine outputs: tokens as text, stop strings, times."""

from __future__ import annotations

import functools
import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from llmjax.engine.core.request import EngineOutput, EngineRequest, SequenceTimes, Vectors
from llmjax.engine.core.stats import RequestStats
from llmjax.engine.front.stop import StopMatcher
from llmjax.errors import GenerationFailed, LLMJaxError
from llmjax.outputs import (
    REPETITION,
    CompletionOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from llmjax.parsing.content import ContentReading
from llmjax.sampling.params import RequestOutputKind
from llmjax.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass
class Continuation:
    """The output so far of one of the n continuations."""

    index: int
    detokenizer: IncrementalDetokenizer | None
    stop: StopMatcher
    each_token: bool  # whether it is kept where each token begins in the text
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    times: SequenceTimes | None = None
    text_seen: int = 0  # characters, with those that a stop string keeps back or has swallowed
    token_starts: list[int] = field(default_factory=list)  # characters before each token, with ``each_token``
    text_sent: int = 0  # for DELTA
    tokens_sent: int = 0
    tokens_due: int = 0  # when there was an output last, with ``stream_interval``

    @property
    def num_shown(self) -> int:
        """Tokens whose text has begun to be shown, or will not be kept back any longer."""
        held_back = self.stop.active and self.token_starts
        return bisect_left(self.token_starts, len(self.text)) if held_back else len(self.token_ids)

    def cut(self, end: int) -> None:
        """Drops the tokens whose text begins at character ``end`` or later."""
        keep = bisect_left(self.token_starts, end)
        del self.token_ids[keep:], self.token_starts[keep:]
        if self.logprobs is not None:
            del self.logprobs[keep:]
            scored = zip(self.token_ids, self.logprobs, strict=True)
            self.cumulative_logprob = sum((entry[token].logprob for token, entry in scored), 0.0)

    def is_due(self, interval: int) -> bool:
        """Whether as many tokens are new since the last output; the first and the last are at once."""
        known = len(self.token_ids)
        due = self.finish_reason is not None or not self.tokens_due or known - self.tokens_due >= interval
        if due:
            self.tokens_due = known
        return due

    def output(self, *, delta: bool) -> CompletionOutput:
        """A snapshot, or only what is new since the last one: tokens come with their text."""
        text, tokens, logprobs, offsets = self.text, self.token_ids, self.logprobs, self.token_starts
        if delta:
            end = self.num_shown if self.finish_reason is None else len(tokens)
            text, tokens = text[self.text_sent :], tokens[self.tokens_sent : end]
            logprobs = logprobs[self.tokens_sent : end] if logprobs is not None else None
            offsets = offsets[self.tokens_sent : end]
            self.text_sent, self.tokens_sent = len(self.text), end
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=list(tokens),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=list(logprobs) if logprobs is not None else None,
            text_offsets=list(offsets) if self.each_token and self.detokenizer is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass
class OpenRequest:
    """A request that has not ended."""

    name: str  # its user's id
    request: EngineRequest
    prompt: str | None
    continuations: list[Continuation]
    engine: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: LLMJaxError | None = None
    vectors: Vectors | None = None

    @property
    def num_unfinished(self) -> int:
        return sum(c.finish_reason is None for c in self.continuations)


class Outputs:
    """Adds the engine's outputs to open requests, as text.

    Args:
        tokenizer: makes text of tokens; None: outputs have only tokens.
        stream_interval: fewest tokens of a streamed output, except for the first and the last.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, stream_interval: int) -> None:
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        # The likely tokens of one position are likely in the next, too.
        self._text_of = functools.cache(self._decode)

    def continuation(
        self, index: int, request: EngineRequest, shown: frozenset[int], reading: ContentReading | None
    ) -> Continuation:
        """A new, empty continuation of a request.

        Args:
            shown: special tokens that are part of the text even where others are left out.
            reading: which text is content, where stop strings are looked for; None: all of it.
        """
        params = request.params
        detokenizer = None
        if self._tokenizer is not None and params.detokenize:
            detokenizer = self._tokenizer.detokenizer(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                shown=shown,
                prompt_ids=request.prompt_token_ids,
            )
        stop = StopMatcher(params.stop, include=params.include_stop_str_in_output, reading=reading)
        return Continuation(
            index=index,
            detokenizer=detokenizer,
            stop=stop,
            each_token=stop.active or params.wants_logprobs or reading is not None,
            logprobs=[] if params.wants_logprobs else None,
            cumulative_logprob=0.0 if params.wants_logprobs else None,
        )

    def take(self, request: OpenRequest, continuation: Continuation, output: EngineOutput) -> None:
        """Adds an output of the engine to one of a request's continuations."""
        continuation.times = output.times
        request.vectors = output.vectors
        request.num_cached_tokens = max(request.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            request.prompt_logprobs = output.prompt_logprobs
        count = len(output.new_token_ids)
        # Where the text may end the continuation, it ends as if each token had come by itself.
        size = 1 if continuation.each_token else max(count, 1)
        for start in range(0, max(count, 1), size):
            self._take_tokens(request.request, continuation, output, start, min(start + size, count))
            if continuation.stop.end is not None:
                break
        if continuation.stop.end is None and output.finish_reason is not None:
            continuation.text += continuation.stop.finish()
        if continuation.stop.end is not None:
            continuation.finish_reason, continuation.stop_reason = "stop", continuation.stop.found
            continuation.cut(continuation.stop.end)
        elif output.finish_reason is not None:
            continuation.finish_reason, continuation.stop_reason = output.finish_reason, output.stop_reason
            if output.finish_reason == REPETITION:
                continuation.stop_reason = "repetition_detected"
            request.error = output.error or request.error

    def _take_tokens(
        self, request: EngineRequest, continuation: Continuation, output: EngineOutput, start: int, end: int
    ) -> None:
        """Takes tokens ``start`` up to ``end`` of an output, and their text."""
        tokens, params = output.new_token_ids[start:end], request.params
        continuation.token_ids.extend(tokens)
        if output.new_logprobs is not None and continuation.logprobs is not None:
            for token, entry in zip(tokens, output.new_logprobs[start:end], strict=True):
                continuation.logprobs.append(self._decoded(entry))
                continuation.cumulative_logprob = (continuation.cumulative_logprob or 0.0) + entry[token].logprob
        if continuation.detokenizer is None:
            return
        last = end == len(output.new_token_ids)
        if last and output.finish_reason == "stop" and not params.include_stop_str_in_output:
            # The stop token; but a grammar may also end with what is part of the text.
            tokens = tokens[:-1] if tokens and tokens[-1] in request.stop_token_ids else tokens
        if continuation.each_token:
            continuation.token_starts += [continuation.text_seen] * (end - start)
        text = continuation.detokenizer.add(tokens)
        if last and output.finish_reason is not None:
            text += continuation.detokenizer.finish()
        continuation.text_seen += len(text)
        may_stop = len(continuation.token_ids) > params.min_tokens
        continuation.text += continuation.stop.add(text, may_stop=may_stop)

    def made(self, request: OpenRequest, touched: list[Continuation]) -> RequestOutput | PoolingRequestOutput | None:
        """The output that a request's user gets now; None: nothing yet.

        Args:
            touched: the continuations that have something new.
        """
        if request.request.pooling is not None:
            return _pooled(request)
        kind = request.request.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY:
            if request.num_unfinished:
                return None
            touched = request.continuations
        elif kind is RequestOutputKind.CUMULATIVE and not request.num_unfinished:
            touched = request.continuations
        else:
            interval = max(self._stream_interval, request.request.params.stream_interval or 1)
            if interval > 1 and not (touched := [c for c in touched if c.is_due(interval)]):
                return None
        prompt_logprobs = request.prompt_logprobs
        if kind is RequestOutputKind.DELTA:
            request.prompt_logprobs = None  # once
        return RequestOutput(
            request_id=request.name,
            prompt=request.prompt,
            prompt_token_ids=request.request.prompt_token_ids,
            outputs=[c.output(delta=kind is RequestOutputKind.DELTA) for c in touched],
            finished=not request.num_unfinished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens,
            metrics=_metrics(request),
            error=request.error,
        )

    def decoded(self, positions: Iterable[TokenLogprobs | None]) -> list[TokenLogprobs | None]:
        """Log-probabilities of a prompt with the text of each token. Any thread may ask, and should for a long prompt:
        there are ``max_logprobs`` times as many as tokens."""
        return [None if entry is None else self._decoded(entry) for entry in positions]

    def _decoded(self, entry: TokenLogprobs) -> TokenLogprobs:
        if self._tokenizer is None:
            return entry
        text = self._text_of
        return {token: Logprob(value.logprob, value.rank, text(token)) for token, value in entry.items()}

    def _decode(self, token: int) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode([token], skip_special_tokens=False)


def _pooled(request: OpenRequest) -> PoolingRequestOutput:
    made, error = request.vectors, request.error
    if made is None and error is None:
        error = GenerationFailed("the request was aborted")
    return PoolingRequestOutput(
        request_id=request.name,
        outputs=PoolingOutput(np.zeros(0, np.float32) if made is None else made),
        prompt_token_ids=request.request.prompt_token_ids,
        num_cached_tokens=request.num_cached_tokens,
        error=error,
    )


def _metrics(request: OpenRequest) -> RequestMetrics:
    times = [c.times for c in request.continuations if c.times is not None]
    return RequestMetrics(
        arrival_time=request.request.arrival_time,
        first_scheduled_time=_earliest(t.scheduled for t in times),
        first_token_time=_earliest(t.first_token for t in times),
        last_token_time=max((t.last_token for t in times if t.last_token is not None), default=None),
        finished_time=None if request.num_unfinished else time.monotonic(),
        num_preemptions=sum(t.num_preemptions for t in times),
    )


def _earliest(times: Iterable[float | None]) -> float | None:
    return min((t for t in times if t is not None), default=None)


def stats_of(request: OpenRequest) -> RequestStats:
    """The statistics of a request that has ended."""
    metrics = _metrics(request)
    arrival, end = metrics.arrival_time, metrics.finished_time or metrics.arrival_time
    scheduled = end if metrics.first_scheduled_time is None else metrics.first_scheduled_time
    first = end if metrics.first_token_time is None else metrics.first_token_time
    last = first if metrics.last_token_time is None else metrics.last_token_time
    reasons = [c.finish_reason or "abort" for c in request.continuations]
    params = request.request.params
    return RequestStats(
        engine=request.engine,
        request_id=request.name,
        finish_reason=next((r for r in ("error", "abort", REPETITION, "length") if r in reasons), "stop"),
        num_prompt_tokens=len(request.request.prompt_token_ids),
        num_generation_tokens=sum(len(c.token_ids) for c in request.continuations),
        num_cached_tokens=request.num_cached_tokens,
        max_tokens=params.max_tokens,
        n=params.n,
        num_preemptions=metrics.num_preemptions,
        e2e_seconds=end - arrival,
        queued_seconds=max(0.0, scheduled - arrival),
        prefill_seconds=max(0.0, first - scheduled),
        decode_seconds=max(0.0, last - first),
        inference_seconds=max(0.0, last - scheduled),
    )
