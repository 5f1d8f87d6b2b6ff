"""The engine's data types: requests, outputs, and the sequence of tokens that a request becomes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from llmjax.adapters.reference import Adaptation
from llmjax.constraints.thinking import ThinkingBudget
from llmjax.engine.constraint import Constraint
from llmjax.engine.core.media import PromptMedia
from llmjax.engine.drafts.drafter import Drafter
from llmjax.errors import LLMJaxError
from llmjax.outputs import TokenLogprobs
from llmjax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class PooledRequest:
    """The options of a request that gets a vector instead of tokens."""

    of_tokens: bool = False  # vectors of each token, not of the text
    every_position: bool = False  # all tokens have to run through the model: nothing of them may be found in a cache
    second_start: int = 2**31 - 1  # where the second text of a pair begins


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """What the front sends to the engine. Plain data, so that it may cross a process boundary."""

    request_id: int  # the engine's id; names that users give stay in the frontend
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # params.max_tokens, cut to the context
    stop_token_ids: frozenset[int]  # end-of-sequence ids included unless ignore_eos
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None  # the grammar that outputs must match
    matcher: LLMatcher | None = None  # the grammar's matcher in its initial state; made again in another process
    thinking: ThinkingBudget | None = None  # how long outputs may reason
    media: PromptMedia | None = None  # images of the prompt; None: it has none
    adaptation: Adaptation | None = None  # adapters that it is computed with; None: the model as it is
    pooling: PooledRequest | None = None  # then ``params`` and what follows from them mean nothing
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = 0.0  # time.monotonic()


@dataclass(kw_only=True, slots=True)
class SequenceTimes:
    """Seconds of time.monotonic(); None: not yet."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_preemptions: int = 0


class EngineOutput(msgspec.Struct, kw_only=True):
    """What a step brought for one sequence of a request.

    It is a struct, because each step makes one for each sequence, and a dataclass takes three times as long to make.
    The garbage collector tracks it, because an error's traceback may refer to the output that has the error.
    """

    request_id: int
    index: int  # which of the n continuations
    times: SequenceTimes
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first token
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | None = None  # the stop token
    vectors: Vectors | None = None  # result of a pooling request: [size], or [tokens, size]
    error: LLMJaxError | None = None  # with finish_reason "error"; its type says whose fault it is


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(eq=False, kw_only=True, slots=True)
class Sequence:
    """One continuation: the prompt, what has been sampled, and where its KV lives.

    ``tokens`` holds what the host knows. Steps in flight are counted as if they sampled as much as they may:
    ``in_flight`` and ``num_computed`` are upper bounds until those steps are read. The device goes by its own lengths.

    An example: a prompt of 5 tokens has been computed, and its step has been read, which brought token 6.

    * Before the next dispatch: 6 tokens are known, 5 computed, 0 in flight; 1 is ``missing``.
    * A dispatch of 4 steps starts: it computes tokens 6 to 9 and samples 7 to 10. ``num_computed`` is 9, ``in_flight``
      4, and ``num_certain`` 6, because it is not known yet whether tokens 7 to 9 will hold.
    * It is read and brought 2 tokens, as the constraint refused the third: 8 are known, 7 computed, 0 in flight.
    """

    request: EngineRequest
    index: int
    order: int  # order of arrival
    seed: int  # seed of this continuation
    tokens: list[int]  # prompt, then output
    times: SequenceTimes

    status: Status = Status.WAITING
    slot: int = -1  # row of the per-sequence device state while running
    adapter_slot: int = 0  # the device's place of its adapter while running; 0: the weights as they are
    num_computed: int = 0  # most tokens whose KV entries are in pages once every dispatched step has run
    in_flight: int = 0  # most tokens that dispatched steps sample and the host has not read
    every_token: bool = False  # the host has to see each token before the second one after it is sampled
    constraint: Constraint | None = None  # None: any token is allowed
    drafter: Drafter | None = None  # drafts what follows ``tokens``; None: nothing does
    keys: list[bytes] = field(default_factory=list)  # digests of the full pages hashed so far
    num_committed: int = 0  # full pages whose content the pools know
    room: int = 0  # tokens up to which no group of layers has pages to give out or to take back
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at admission
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    vectors: list[Vectors] = field(default_factory=list)  # vectors of the tokens of each chunk, if they are asked for

    # What follows from the request; planning asks for it at every step.
    num_prompt_tokens: int = field(init=False)
    end: int = field(init=False)  # tokens with all that it may have
    rank: tuple[int, int] = field(init=False)  # smaller is served first, larger preempted first
    media_end: int = field(init=False)  # first token after the last image of the prompt; 0: there is none
    digest: str | None = field(init=False)  # identifies its adapters; None: it has none
    between: bool = field(init=False)  # the host may have something to do between two of its tokens

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.end = self.num_prompt_tokens + self.request.max_tokens
        self.rank = (self.request.priority, self.order)
        self.media_end = 0 if self.request.media is None else self.request.media.end
        self.digest = None if self.request.adaptation is None else self.request.adaptation.digest
        limited = self.every_token or self.constraint is not None
        self.between = limited or self.request.params.min_tokens > 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens, with those in flight."""
        return len(self.tokens) + self.in_flight

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 when all it may have are sampled or being sampled."""
        num_known = len(self.tokens) + self.in_flight
        return num_known - self.num_computed if num_known < self.end else 0

    @property
    def forced(self) -> bool:
        """Whether the tokens to compute are those that its constraint forces."""
        constraint = self.constraint
        return constraint is not None and constraint.jumps and self.num_computed >= self.num_prompt_tokens

    @property
    def steps_left(self) -> int:
        """Tokens until ``max_tokens``."""
        return self.end - len(self.tokens) - self.in_flight

    @property
    def steps_alone(self) -> int:
        """Tokens the device may sample before the host has to do something for the sequence."""
        if self.every_token or self.needs_mask:
            return 1
        forbidden = self.request.params.min_tokens - (self.num_tokens - self.num_prompt_tokens)
        alone = forbidden if forbidden > 0 else self.steps_left  # then stop ids are allowed again
        return alone if self.constraint is None else min(alone, self.constraint.steps(self.in_flight))

    @property
    def needs_mask(self) -> bool:
        """Whether the host has to make a mask for its next token."""
        return self.constraint is not None and self.constraint.needs_mask

    @property
    def may_need_masks(self) -> bool:
        """Whether some of its tokens may have to be sampled under masks."""
        return self.constraint is not None and self.constraint.masks

    @property
    def waits_to_be_read(self) -> bool:
        """Whether steps in flight have to be read before it continues: its constraint may then force what follows, or
        refuse some of their tokens while ``min_tokens`` is counted by known tokens."""
        constraint = self.constraint
        if constraint is None or not self.in_flight or constraint.needs_mask:
            return False
        if constraint.steps(self.in_flight) <= 0:
            return True
        if not constraint.runs:
            return False
        return len(self.tokens) - self.num_prompt_tokens < self.request.params.min_tokens

    @property
    def num_certain(self) -> int:
        """Number of tokens whose KV entries are certain to be in pages when the next step runs."""
        return min(self.num_computed, len(self.tokens))

    @property
    def needs_every_position(self) -> bool:
        """Whether every token of the prompt has to run through the model."""
        pooling = self.request.pooling
        return self.wants_prompt_logprobs if pooling is None else pooling.every_position

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions still have to be scored; the first continuation does it for all."""
        if self.request.params.prompt_logprobs is None or self.index > 0:
            return False
        return len(self.prompt_logprobs or ()) < self.num_prompt_tokens
