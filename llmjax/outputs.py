"""What a request gives back. Field names follow vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmjax.errors import LLMJaxError


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token at one position, before any processing of the logits."""

    logprob: float
    rank: int | None = None  # 1: the most probable token of the vocabulary
    decoded_token: str | None = None


# One position: the sampled (or prompt) token and the top N, keyed by token id.
TokenLogprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One of the ``n`` continuations of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None  # one entry per token id, but none for those of a stop string
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """When things happened, in seconds of ``time.monotonic()``; None: not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """The state of a request, or what is new in it (``SamplingParams.output_kind``)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # entry 0 is None: nothing precedes it
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    metrics: RequestMetrics | None = field(default=None, repr=False)
    error: LLMJaxError | None = None  # why a continuation has the finish reason "error"
