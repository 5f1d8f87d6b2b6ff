"""What a user may ask of the sampler. Names and meaning follow vLLM's ``SamplingParams``."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from llmjax.errors import InvalidRequest
from llmjax.kv_transfer import KVTransfer
from llmjax.sampling.structured import StructuredOutputsParams

MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_N = 128
MAX_WINDOW = 1024  # tokens that penalties may look back at, if not at all
MAX_SCORED = 128  # tokens whose log-probabilities a request may name, as in vLLM
MAX_WORD_CHARS = 4096  # of all stop strings together, and of all bad words; every one is looked for at each step
MAX_PATTERN = 256  # tokens; every length up to it is looked for after each token
MAX_LENGTH_PENALTY = 32.0  # a million tokens to this power are a number still
GREEDY_BELOW = 1e-5  # temperatures below this are greedy (vLLM's threshold)


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a sampling parameter may be.

    Args:
        low: the smallest one.
        high: the largest one.
        whole: whether they are integers.
        low_open: whether ``low`` itself is left out.
        optional: whether None is allowed as well.
    """

    low: float
    high: float
    whole: bool = False
    low_open: bool = False
    optional: bool = False

    def check(self, name: str, value: object) -> None:
        """Raises ``InvalidRequest``, which names the parameter, for what is not in the range."""
        if self.whole:
            _integer(name, value, int(self.low), int(self.high))
        else:
            _number(name, value, self.low, self.high, low_open=self.low_open)


def _whole(low: int, high: int = 2**31 - 1, *, optional: bool = False) -> Range:
    return Range(low=low, high=high, whole=True, optional=optional)


# In the order in which they are checked.
RANGES: Mapping[str, Range] = {
    "n": _whole(1, MAX_N),
    "temperature": Range(low=0.0, high=math.inf),
    "top_p": Range(low=0.0, high=1.0, low_open=True),
    "top_k": _whole(-1),
    "min_p": Range(low=0.0, high=1.0),
    "presence_penalty": Range(low=-2.0, high=2.0),
    "frequency_penalty": Range(low=-2.0, high=2.0),
    "repetition_penalty": Range(low=0.0, high=math.inf, low_open=True),
    "seed": _whole(-(2**63), 2**63 - 1, optional=True),
    "max_tokens": _whole(1, optional=True),
    "min_tokens": _whole(0),
    "logprobs": _whole(-1, optional=True),
    "prompt_logprobs": _whole(-1, optional=True),
    "repeat_last_n": _whole(-1, MAX_WINDOW, optional=True),
    "stream_interval": _whole(1, optional=True),
}


class RequestOutputKind(enum.Enum):
    """What each streamed ``RequestOutput`` holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last output
    FINAL_ONLY = 2  # one output, at the end


@dataclass(frozen=True, kw_only=True)
class RepetitionDetectionParams:
    """When an output counts as one that only repeats itself; it ends then. Names follow vLLM's.

    Args:
        max_pattern_size: tokens of the longest pattern that is looked for; 0: none is.
        min_pattern_size: tokens of the shortest; 0 means 1.
        min_count: how often the pattern stands at the end, without a gap.

    Raises:
        InvalidRequest: a value is out of range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        name = "repetition_detection"
        _integer(f"{name}.max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN, field=name)
        _integer(f"{name}.min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size, field=name)
        _integer(f"{name}.min_count", self.min_count, 2 if self.max_pattern_size else 0, 2**31 - 1, field=name)

    def repeats(self, tokens: Sequence[int], *, start: int) -> bool:
        """Whether ``tokens[start:]`` end in such a pattern."""
        end = len(tokens)
        longest = min(self.max_pattern_size, (end - start) // self.min_count if self.min_count else 0)
        for size in range(max(self.min_pattern_size, 1), longest + 1):
            repeated = size * (self.min_count - 1)
            if tokens[-1] == tokens[-1 - size] and tokens[end - repeated :] == tokens[end - repeated - size : -size]:
                return True
        return False


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request; immutable, checked on construction.

    Raises:
        InvalidRequest: a value is out of range; ``field`` names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: up to the model's context
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # None: none; 0: the sampled token's only; -1: of all tokens
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None  # tokens whose log-probabilities come with each sampled one
    repeat_last_n: int | None = None  # tokens that the penalties look at, counted from the end; None, -1: all; 0: none
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    repetition_detection: RepetitionDetectionParams | None = None  # a mapping of its fields is one, too
    stream_interval: int | None = None  # tokens of a streamed output at least, but for the first and the last
    skip_reading_prefix_cache: bool | None = None  # everything is computed, whatever is cached
    kv_transfer: KVTransfer | None = None  # what becomes of the prompt's pages at other servers
    guided_decoding: StructuredOutputsParams | None = None  # older name of structured_outputs, where it is put

    def __post_init__(self) -> None:
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise InvalidRequest("guided_decoding is structured_outputs; give one of them", field="guided_decoding")
            object.__setattr__(self, "structured_outputs", self.guided_decoding)
            object.__setattr__(self, "guided_decoding", None)
        if isinstance(self.repetition_detection, Mapping):
            object.__setattr__(self, "repetition_detection", _repetition_detection(self.repetition_detection))
        stop = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop)
        bad_words = (self.bad_words,) if isinstance(self.bad_words, str) else _listed("bad_words", self.bad_words)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "bad_words", bad_words)
        object.__setattr__(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _listed("allowed_token_ids", self.allowed_token_ids))
        if self.logprob_token_ids is not None:
            scored = _listed("logprob_token_ids", self.logprob_token_ids)
            _token_ids("logprob_token_ids", scored)
            object.__setattr__(self, "logprob_token_ids", tuple(dict.fromkeys(scored)) or None)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InvalidRequest(f"logit_bias must be a mapping, not {self.logit_bias!r}", field="logit_bias")
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        self._check()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def wants_logprobs(self) -> bool:
        """Log-probabilities come with each token."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    def _check(self) -> None:
        for name, allowed in RANGES.items():
            if (value := getattr(self, name)) is not None or not allowed.optional:
                allowed.check(name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", field="min_tokens"
            )
        _at_most("stop", self.stop, MAX_STOP_STRINGS)
        _at_most("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _at_most("bad_words", self.bad_words, MAX_BAD_WORDS)
        _words("stop", self.stop)
        _words("bad_words", self.bad_words)
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True; use stop_token_ids instead", field="stop")
        if self.logprob_token_ids is not None:
            _at_most("logprob_token_ids", self.logprob_token_ids, MAX_SCORED)
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be a boolean, not {value!r}", field=name)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequest(
                f"output_kind must be a RequestOutputKind, not {self.output_kind!r}", field="output_kind"
            )
        if not isinstance(self.skip_reading_prefix_cache, bool | None):
            raise InvalidRequest("skip_reading_prefix_cache must be a boolean", field="skip_reading_prefix_cache")
        if not isinstance(self.repetition_detection, RepetitionDetectionParams | None):
            raise InvalidRequest("repetition_detection must be RepetitionDetectionParams", field="repetition_detection")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequest("structured_outputs must be StructuredOutputsParams", field="structured_outputs")
        _token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids is empty: nothing could be sampled", field="allowed_token_ids")
            _token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.logit_bias:
            _token_ids("logit_bias", self.logit_bias)
            biases: Collection[object] = self.logit_bias.values()
            if set(map(type, biases)) <= {int, float}:
                biases = set(biases)  # few of many differ
            for bias in biases:
                _number("logit_bias", bias, -100.0, 100.0)


PARAM_NAMES = frozenset(f.name for f in fields(SamplingParams))
_FLAGS = tuple(f.name for f in fields(SamplingParams) if f.type == "bool")


@dataclass(frozen=True)
class BeamSearchParams:
    """How to search for likely continuations; immutable, checked on construction. Names follow vLLM's.

    A continuation's score is its log-probability divided by ``length ** length_penalty``; length counts the prompt, but
    not the token that ends the text.

    Args:
        beam_width: continuations that are kept at each step, and returned.
        max_tokens: most tokens of a continuation.
        ignore_eos: ends of texts are tokens like others.
        temperature: accepted, and without effect: scores are those of the model.
        length_penalty: above 0 favors long continuations, since log-probabilities are negative.
        include_stop_str_in_output: the token that ends a text is among its tokens.
        structured_outputs: None; forms are not searched yet.

    Raises:
        InvalidRequest: a value is out of range; ``field`` names it.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, 1, MAX_N)
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if self.structured_outputs is not None:
            raise InvalidRequest("structured_outputs cannot be combined with beam search", field="structured_outputs")

    @property
    def candidates(self) -> int:
        """The likeliest tokens that may follow each continuation: half of them may end it, and enough are left."""
        return 2 * self.beam_width


def _listed(name: str, values: object) -> tuple[Any, ...]:
    """A list's items; None has none."""
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidRequest(f"{name} must be a list, not {str(values)[:80]!r}", field=name)
    return tuple(values)


def _at_most(name: str, values: Sequence[object], limit: int) -> None:
    if len(values) > limit:
        raise InvalidRequest(f"{name} has {len(values)} entries; at most {limit} are allowed", field=name)


def _words(name: str, words: Sequence[object]) -> None:
    chars = 0
    for word in words:
        if not isinstance(word, str) or not word:
            raise InvalidRequest(f"{name} must hold non-empty strings", field=name)
        chars += len(word)
    if chars > MAX_WORD_CHARS:
        raise InvalidRequest(
            f"{name} has {chars} characters; at most {MAX_WORD_CHARS} are allowed in all of them", field=name
        )


def _token_ids(name: str, ids: Collection[Any]) -> None:
    """Checks each id; lists as long as a vocabulary pass at the speed of ``min``."""
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 2**31:
        return
    for token in ids:
        _integer(name, token, 0, 2**31 - 1)


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    above = number > low if low_open else number >= low  # False for NaN
    if not above or number > high or number == math.inf:
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
        raise InvalidRequest(f"{name} must be a number in {interval}, not {value!r}", field=name)


def _integer(name: str, value: object, low: int, high: int, *, field: str | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        shown = f"{value!r}"[:80]
        raise InvalidRequest(f"{name} must be an integer in [{low}, {high}], not {shown}", field=field or name)


def _repetition_detection(given: Mapping[str, Any]) -> RepetitionDetectionParams:
    names = {field.name for field in fields(RepetitionDetectionParams)}
    if unknown := next((name for name in given if name not in names), None):
        message = f"repetition_detection has no {str(unknown)[:80]!r}; it has {', '.join(sorted(names))}"
        raise InvalidRequest(message, field="repetition_detection")
    return RepetitionDetectionParams(**given)
