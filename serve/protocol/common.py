"""Fields and rules that chat and completion requests share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from operator import or_
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from llmjax.engine.front.beam_search import MAX_BEAM_TOKENS
from llmjax.errors import InvalidRequest
from llmjax.sampling.params import MAX_N, BeamSearchParams, RequestOutputKind, SamplingParams
from llmjax.serve.errors import ApiError, cut

# One bad element ends the check: a list of 10^6 wrong ones must not make 10^6 error objects.
Ints = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]


def at_most(limit: int) -> BeforeValidator:
    """Refuses a longer list before its entries are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > limit:
            raise PydanticCustomError("too_long", f"has {len(value)} entries; at most {limit} are allowed")
        return value

    return BeforeValidator(check)


def object_of(*types: type) -> PlainValidator:
    """An object whose values are all of ``types``. Wrong ones, however many, are one error, unlike with ``dict[…]``."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict) or not set(map(type, value.values())) <= {*types}:
            names = " or ".join(kind.__name__ for kind in types)
            raise PydanticCustomError("object_of", f"Input should be an object whose values are all {names}")
        return value

    return PlainValidator(check, json_schema_input_type=dict[str, reduce(or_, types)])  # type: ignore[misc]


AS_MANY_AS_FIT = -1  # tokens of an answer

MAX_IGNORED = 16  # unknown fields of a request that are named where they are ignored


@dataclass
class IgnoredFields:
    """Names of fields that a request has and nobody reads, as many as are told."""

    names: list[str] = field(default_factory=list)


class ApiModel(BaseModel):
    """A request body. Unknown fields with a value are errors, numbers in strings are not numbers.

    The context of a validation may be an ``IgnoredFields``, which takes unknown fields instead.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    # Fields that are known but not supported, with the values that change nothing (None always is one), and why not.
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    reasons: ClassVar[Mapping[str, str]] = {}
    # Fields that could only change how fast, how long or where an answer is made: they are taken, whatever they say,
    # and named in the response unless they have one of these values.
    hints: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def unheeded_hints(self) -> list[str]:
        """Hints that ask for something."""
        return [name for name, neutral in self.hints.items() if getattr(self, name) not in (None, *neutral)]

    @model_validator(mode="before")
    @classmethod
    def _given_fields(cls, data: Any, info: ValidationInfo) -> Any:
        """Fields without a value go: they have their defaults. Of unknown ones that have one all but one go: pydantic
        makes an error object of each, with its name, which is therefore cut."""
        fields = cls.model_fields
        if not isinstance(data, dict) or (data.keys() <= fields.keys() and None not in data.values()):
            return data
        names = {
            name: value
            for name, value in data.items()
            if name in fields and (value is not None or fields[name].is_required())
        }
        unknown = (name for name, value in data.items() if name not in fields and value is not None)
        if isinstance(info.context, IgnoredFields):
            if cls.model_config.get("extra") == "forbid":
                info.context.names += [cut(name) for name in islice(unknown, MAX_IGNORED - len(info.context.names))]
        elif (name := next(unknown, None)) is not None:
            names[cut(name)] = data[name]
        return names


MAX_BIASES = 2**14  # entries of a `logit_bias` that is a list
MAX_METADATA = 16  # entries, of keys of at most 64 and values of at most 512 characters, as OpenAI has it

Name = Annotated[str, Field(max_length=512)]


def few_short_texts(value: dict[str, str]) -> dict[str, str]:
    """Metadata as OpenAI bounds it."""
    if len(value) > MAX_METADATA or any(len(key) > 64 or len(text) > 512 for key, text in value.items()):
        raise PydanticCustomError(
            "metadata",
            f"takes at most {MAX_METADATA} entries, keys of 64 and values of 512 characters",
        )
    return value


def _stop_of_candle(value: Any) -> Any:
    """``{"Single": "x"}`` and ``{"Multi": ["x"]}``, as candle-vLLM writes them."""
    if isinstance(value, dict) and len(value) == 1 and (kind := next(iter(value))) in ("Single", "Multi"):
        return value[kind]
    return value


def _of_pairs(value: Any) -> Any:
    """Pairs of a token id and what is added to its logit, as llama-server has them; false is -100."""
    if not isinstance(value, list) or len(value) > MAX_BIASES:
        return value
    found = {}
    for pair in value:
        match pair:
            case [int() as token, int() | float() as bias] if not isinstance(token, bool) and bias is not True:
                found[str(token)] = -100.0 if bias is False else bias
            case _:
                return value
    return found


class StreamOptions(ApiModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class AdapterScale(ApiModel):
    """The factor of an adapter of ``--lora``."""

    id: int
    scale: Annotated[float, Field(allow_inf_nan=False)]


AdapterScales = Annotated[list[AdapterScale], at_most(64)]


class GenerationRequest(ApiModel):
    """What every request that generates text may carry; None means: the model's or the server's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[str | Strings | None, BeforeValidator(_stop_of_candle)] = None
    stop_token_ids: Ints | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: Annotated[Annotated[dict[str, float], object_of(int, float)] | None, BeforeValidator(_of_pairs)] = None
    allowed_token_ids: Ints | None = None
    bad_words: Strings | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Ints | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    return_token_offsets: bool | None = None  # of what is rendered
    stream_interval: Annotated[int, Field(ge=1)] | None = None
    skip_reading_prefix_cache: bool | None = None
    repetition_detection: Annotated[dict[str, int], object_of(int)] | None = None
    priority: int | None = None
    # Hashed for each of n continuations, on the engine's thread.
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    lora: AdapterScales | None = None  # factors of llama-server's adapters

    # OpenAI's schema begins at 0, which asks for no more than ``n`` does.
    best_of: Annotated[Annotated[int, Field(ge=0, le=MAX_N)] | None, AfterValidator(lambda best: best or None)] = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    parallel_tool_calls: bool | None = None

    # The form of the answer.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None  # there is one

    # Written to the access log.
    user: Name | None = None
    safety_identifier: Name | None = None
    session_id: Name | None = None
    metadata: Annotated[dict[str, str], object_of(str), AfterValidator(few_short_texts)] | None = None

    # Accepted, and without effect on the answer: ``without_effect`` names those that ask for one.
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    prompt_cache_key: Name | None = None
    store: bool | None = None

    kv_transfer_params: dict[str, Any] | None = None  # read by `llmjax.kv_transfer.KVTransfer`

    return_mm_kwargs: bool | None = None  # of rendered images, of which there are none

    # Known, not supported.
    watermarking: Any = None
    early_stopping: Any = None
    ec_transfer_params: Any = None
    routed_experts_prompt_start: Any = None
    vllm_xargs: Any = None
    thinking_token_budget: Any = None
    # SGLang's, which vllm-router and sglang-router write into every request.
    no_stop_trim: Any = None
    separate_reasoning: Any = None
    stream_reasoning: Any = None
    return_hidden_states: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "watermarking": (False,),
        "early_stopping": (False,),
        "ec_transfer_params": ({},),
        "routed_experts_prompt_start": (0,),
        "vllm_xargs": ({},),
        "thinking_token_budget": (-1,),
        "no_stop_trim": (False,),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
        "return_hidden_states": (False,),
    }

    reasons: ClassVar[Mapping[str, str]] = {
        "watermarking": "is not supported: tokens are sampled without a watermark",
        "early_stopping": "is not supported: a beam search decides itself when it ends",
        "ec_transfer_params": "is not supported: models read and write text only",
        "routed_experts_prompt_start": "is not supported: the experts that tokens go to are not reported",
        "vllm_xargs": "is not supported: there are no extensions that would read it",
        "no_stop_trim": "is not supported; include_stop_str_in_output keeps stop strings",
        "separate_reasoning": "is not supported; start the server without a reasoning parser, or leave it out",
        "stream_reasoning": "is not supported: reasoning is streamed as it comes",
        "return_hidden_states": "is not supported",
    }

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def continuations(self) -> int:
        """How many are generated, of which ``choices`` are answered."""
        return self.choices if self.best_of is None else self.best_of

    def check_best_of(self) -> None:
        """Raises ``ApiError`` for a ``best_of`` that cannot be."""
        if self.best_of is None or self.best_of == self.choices:
            return
        if self.best_of < self.choices:
            raise ApiError(f"best_of is {self.best_of}, below n = {self.choices}", param="best_of")
        if self.stream and not self.use_beam_search:
            raise ApiError("best_of above n cannot be streamed: the best is known at the end", param="best_of")

    def without_effect(self) -> list[str]:
        """Fields that are accepted although nothing comes of what they ask for."""
        asked = {"store": bool(self.store), "return_token_offsets": bool(self.return_token_offsets)}
        if self.logprob_token_ids:
            asked["top_logprobs"] = bool(getattr(self, "top_logprobs", None))
        if self.use_beam_search:
            asked |= {name: getattr(self, name) is not None for name in SAMPLING_ONLY}
        options = None if self.stream else self.stream_options
        asked["stream_options"] = options is not None and bool(options.model_dump(exclude_none=True))
        return [*(name for name, given in asked.items() if given), *self.unheeded_hints()]

    @property
    def tier(self) -> dict[str, str]:
        """The tier that an answer names, if the request does."""
        return {} if self.service_tier is None else {"service_tier": "default"}

    def expand_logprobs(self, vocab_size: int) -> None:
        """-1 log-probabilities are those of the whole vocabulary."""
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            if (value := getattr(self, name, None)) == -1 and type(value) is int:
                setattr(self, name, vocab_size)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def obfuscates(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_obfuscation)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


# Fields that say how to choose among likely tokens: a search keeps the likeliest.
SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p", "seed")

# Fields that change what is likely, or where an answer ends, with the values that do not.
NOT_SEARCHED: Mapping[str, tuple[Any, ...]] = {
    "stop": ("", []),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "repeat_last_n": (-1,),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
}

MAX_TOKEN_DIGITS = 10  # of a token id, which has 31 bits

# Request field and SamplingParams field of the same name and meaning.
SAME_NAME = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "logprob_token_ids",
    "repeat_last_n",
    "stream_interval",
    "skip_reading_prefix_cache",
    "repetition_detection",
)


def sampling_params(
    body: GenerationRequest,
    *,
    defaults: Mapping[str, Any],
    max_tokens: int,
    max_tokens_field: str = "max_tokens",
    logprobs: int | None,
    detokenize: bool,
    **changes: Any,
) -> SamplingParams:
    """The sampler's view of a request: given fields win over the model's defaults, those over the library's.

    Args:
        defaults: sampling fields of the model's generation_config.
        max_tokens: resolved; see ``llmjax.serve.prompts.output_budget``.
        max_tokens_field: what the request calls it.
        logprobs: top log-probabilities a sampled token, or None.
        detokenize: False where there is no tokenizer.
        changes: SamplingParams fields that win over everything.

    Raises:
        InvalidRequest: a value is out of range.
    """
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {body.min_tokens}, above {max_tokens_field} {max_tokens}", field="min_tokens"
        )
    if body.logprob_token_ids is not None:
        _check_named(body, logprobs)
        logprobs = 0  # the sampled token's, and those that are named
    same_named = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        same_named["logit_bias"] = _token_keys(body.logit_bias)
    if body.best_of is not None:
        same_named["n"] = body.continuations
        logprobs = logprobs or 0  # the best are chosen by them
    fixed = {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "detokenize": detokenize,
        "output_kind": RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    }
    return SamplingParams(**{**defaults, **same_named, **fixed, **changes})


def check_beam_search(body: GenerationRequest) -> None:
    """Raises ``ApiError`` for what a beam search cannot have, and for what belongs to one where there is none."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise ApiError("length_penalty needs use_beam_search=true", param="length_penalty", code="invalid_value")
        return
    if body.stream:
        raise ApiError(
            "a beam search cannot be streamed: which answers are the best is known at the end",
            param="stream",
            code="invalid_value",
        )
    for name, neutral in NOT_SEARCHED.items():
        if getattr(body, name, None) not in (None, *neutral):
            raise ApiError(
                f"`{name}` cannot be combined with use_beam_search", param=name, code="unsupported_parameter"
            )


def beam_search_params(body: GenerationRequest, *, max_tokens: int, asked: int | None) -> BeamSearchParams:
    """A request's beam search.

    Args:
        max_tokens: resolved; see ``llmjax.serve.prompts.output_budget``.
        asked: the request's own; if there is none, a search takes what it may.

    Raises:
        InvalidRequest: a value is out of range.
    """
    width = body.continuations
    if asked is None:
        max_tokens = min(max_tokens, max(MAX_BEAM_TOKENS // max(width, 1), 1))
    return BeamSearchParams(
        beam_width=width,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )


def _token_keys(bias: Mapping[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_TOKEN_DIGITS):
            raise InvalidRequest(f"logit_bias has the key {key[:40]!r}, which is not a token id", field="logit_bias")
    return {int(key): value for key, value in bias.items()}


def _check_named(body: GenerationRequest, logprobs: int | None) -> None:
    """Raises ``ApiError`` for ``logprob_token_ids`` without log-probabilities to be among, as vLLM has it."""
    field = "logprob_token_ids"
    if not body.logprob_token_ids:
        raise ApiError(f"`{field}` is empty; leave it out", param=field, code="invalid_value")
    if logprobs is None:
        raise ApiError(
            f"`{field}` needs log-probabilities to be asked for (`logprobs`)", param=field, code="invalid_value"
        )


def check_stream(body: GenerationRequest) -> None:
    """Raises ``ApiError`` for what only a stream, or only a whole answer, can have."""
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs cannot be streamed", param="prompt_logprobs", code="invalid_value")


def check_truncation(body: GenerationRequest) -> None:
    if body.truncation_side is not None and body.truncate_prompt_tokens is None:
        raise ApiError("truncation_side needs truncate_prompt_tokens", param="truncation_side", code="invalid_value")
