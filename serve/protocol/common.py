"""Fields and rules that chat and completion requests share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from llmjax.errors import InvalidRequest
from llmjax.sampling.params import RequestOutputKind, SamplingParams
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

    return PlainValidator(check)


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

    # Fields that are known but not supported yet, with the values that change nothing (None always is one).
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _at_most_one_unknown_field(cls, data: Any, info: ValidationInfo) -> Any:
        """Of unknown fields those without a value go, and all but one of the others: pydantic makes an error object of
        each, with its name, which is therefore cut."""
        if not isinstance(data, dict) or data.keys() <= cls.model_fields.keys():
            return data
        known = {name: value for name, value in data.items() if name in cls.model_fields}
        unknown = (name for name, value in data.items() if name not in cls.model_fields and value is not None)
        if isinstance(info.context, IgnoredFields):
            if cls.model_config.get("extra") == "forbid":
                info.context.names += [cut(name) for name in islice(unknown, MAX_IGNORED - len(info.context.names))]
        elif (name := next(unknown, None)) is not None:
            known[cut(name)] = data[name]
        return known


class StreamOptions(ApiModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


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
    stop: str | Strings | None = None
    stop_token_ids: Ints | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, float], object_of(int, float)] | None = None
    allowed_token_ids: Ints | None = None
    bad_words: Strings | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    # Hashed for each of n continuations, on the engine's thread.
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None

    # Accepted and without effect on the answer.
    user: str | None = None
    metadata: Annotated[dict[str, str], object_of(str)] | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    session_id: str | None = None

    # Known, not supported yet.
    store: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    logprob_token_ids: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    repetition_detection: Any = None
    stream_interval: Any = None
    return_prompt_text: Any = None
    thinking_token_budget: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "store": (False,),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "logprob_token_ids": ([],),
        "kv_transfer_params": (),
        "vllm_xargs": ({},),
        "repetition_detection": (),
        "stream_interval": (1,),
        "return_prompt_text": (False,),
        "thinking_token_budget": (),
    }

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def obfuscates(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_obfuscation)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


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
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = _token_keys(body.logit_bias)
    fixed = {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "detokenize": detokenize,
        "output_kind": RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    }
    return SamplingParams(**{**defaults, **given, **fixed, **changes})


def _token_keys(bias: Mapping[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_TOKEN_DIGITS):
            raise InvalidRequest(f"logit_bias has the key {key[:40]!r}, which is not a token id", field="logit_bias")
    return {int(key): value for key, value in bias.items()}


def check_logprobs(value: int | None, *, field: str, limit: int) -> None:
    if value is not None and not 0 <= value <= limit:
        raise ApiError(f"{field} must be between 0 and {limit}, not {value}", param=field, code="invalid_value")


def check_stream(body: GenerationRequest) -> None:
    """Raises ``ApiError`` for what only a stream, or only a whole answer, can have."""
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs cannot be streamed", param="prompt_logprobs", code="invalid_value")
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream=true", param="stream_options", code="invalid_value")


def check_truncation(body: GenerationRequest) -> None:
    if body.truncation_side is not None and body.truncate_prompt_tokens is None:
        raise ApiError("truncation_side needs truncate_prompt_tokens", param="truncation_side", code="invalid_value")
