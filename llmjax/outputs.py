"""What a request gives back. Field names follow vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from llmjax.errors import LLMJaxError

REPETITION = "repetition"  # a finish reason: ``SamplingParams.repetition_detection`` has found one


@dataclass(frozen=True, slots=True)  # there may be 100,000 of them, which garbage collection visits
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
    text_offsets: list[int] | None = None  # characters of the whole text before each token; with log-probabilities
    finish_reason: str | None = None  # "stop", "length", "repetition", "abort", "error"
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
class PoolingOutput:
    """What was made of a text: f32 [size], or of each of its tokens [tokens, size]."""

    data: npt.NDArray[np.float32]


@dataclass
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """A probability, or another number, of each label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    """How well two texts fit."""

    score: float


Pooled = TypeVar("Pooled", bound="PooledOutput[Any]")
Made = TypeVar("Made", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass
class PooledOutput(Generic[Made]):
    """What a request that pools gives back."""

    request_id: str
    outputs: Made
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
    error: LLMJaxError | None = None  # then ``outputs`` hold nothing

    def into(self, kind: type[Pooled], outputs: Any) -> Pooled:
        """The same for the same request, with ``outputs`` in the form that ``kind`` has."""
        return kind(**{**vars(self), "outputs": outputs})


class PoolingRequestOutput(PooledOutput[PoolingOutput]):
    """What ``LLM.encode`` returns for one input."""


class EmbeddingRequestOutput(PooledOutput[EmbeddingOutput]):
    """What ``LLM.embed`` returns for one input."""


class ClassificationRequestOutput(PooledOutput[ClassificationOutput]):
    """What ``LLM.classify`` returns for one input."""


class ScoringRequestOutput(PooledOutput[ScoringOutput]):
    """What ``LLM.score`` returns for one pair."""


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


@dataclass
class BeamSearchSequence:
    """A continuation that beam search has found."""

    tokens: list[int]  # the prompt's and its own, with the one that ends the text
    logprobs: list[TokenLogprobs]  # for each of its own tokens those that might have stood there
    cum_logprob: float = 0.0  # of its own tokens together
    text: str | None = None  # of all tokens
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | None = None  # the token that ends the text


@dataclass
class BeamSearchOutput:
    """What ``LLM.beam_search`` finds for a prompt."""

    sequences: list[BeamSearchSequence]  # the best first
    error: LLMJaxError | None = None  # then there are none
