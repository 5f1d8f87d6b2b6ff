"""llama-server's own API: the request bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.common import MAX_BIASES, AdapterScales, ApiModel, Strings, at_most
from llmjax.serve.protocol.llama_cpp import (
    HINTS,
    NEUTRAL_VALUES,
    REASONS,
    LlamaCppOthers,
    LlamaCppSampling,
    Samplers,
    switched_off,
)
from llmjax.serve.protocol.pooling import Inputs

MAX_EXTRA = 1024  # files beside the one with the gap
MIXED = "must be a text, token ids, a list that mixes both, or a list of such prompts"

Part = str | int
Bias = tuple[str | int, float]  # a token's id, or a text whose tokens are meant, and what is added to its logits


@dataclass(frozen=True)
class Prompt:
    """One prompt: texts and token ids in their order."""

    parts: Sequence[Part]


class LlamaSampling(LlamaCppSampling, LlamaCppOthers):
    """How an answer is made; None: as the model's makers recommend, and not as llama-server does."""

    model: str | None = None
    stream: bool | None = None
    n_predict: Annotated[int, Field(ge=-2)] | None = None
    max_tokens: Annotated[int, Field(ge=-2)] | None = None
    ignore_eos: bool | None = None
    samplers: Samplers | None = None
    logit_bias: Annotated[list[Any], at_most(MAX_BIASES)] | dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    cache_prompt: bool | None = None
    n_probs: Annotated[int, Field(ge=0)] | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: Strings | None = None
    lora: AdapterScales | None = None

    n_cmpl: Any = None

    hints: ClassVar[Mapping[str, tuple[Any, ...]]] = HINTS
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"n_cmpl": (1,), **NEUTRAL_VALUES}
    reasons: ClassVar[Mapping[str, str]] = {"n_cmpl": "is not supported here: /v1/completions has n", **REASONS}

    def check(self) -> None:
        """Raises ``ApiError`` for fields that exclude each other."""
        if self.grammar and self.json_schema is not None:
            raise ApiError("`grammar` cannot be combined with json_schema", param="grammar", code="invalid_value")
        if None not in (self.n_predict, self.max_tokens):
            raise ApiError("`max_tokens` is n_predict; give one of them", param="max_tokens", code="invalid_value")

    def sampled(self, name: str) -> Any:
        """A field that a sampler reads: what leaves it out, if ``samplers`` does."""
        return switched_off(self.samplers).get(name, getattr(self, name))

    def without_effect(self) -> list[str]:
        """What is given and changes nothing."""
        return self.unheeded_hints()

    @property
    def biases(self) -> list[Bias]:
        """The entries of ``logit_bias``, in whichever form it has; false, which bars a token, is the lowest one.

        Raises:
            ApiError: an entry is wrong.
        """
        given = self.logit_bias
        pairs: Sequence[Any]
        if isinstance(given, dict):
            if len(given) > MAX_BIASES:
                raise _wrong_bias(f"has {len(given)} entries; at most {MAX_BIASES} are allowed")
            pairs = [(int(key) if key.isascii() and key.isdigit() else key, value) for key, value in given.items()]
        else:
            pairs = given or []
        return [_bias(pair) for pair in pairs]


def _bias(pair: Any) -> Bias:
    match pair:
        case [int() | str() as token, False] if not isinstance(token, bool):
            return token, -100.0
        case [int() | str() as token, int() | float() as bias] if not isinstance(token, bool) and bias is not True:
            return token, float(bias)
    raise _wrong_bias("must hold pairs of a token id, or a text, and a number or false")


def _wrong_bias(why: str) -> ApiError:
    return ApiError(f"`logit_bias` {why}", param="logit_bias", code="invalid_value")


class LlamaCompletionRequest(LlamaSampling):
    """POST /completion and /completions."""

    prompt: Any

    @property
    def prompts(self) -> list[Prompt]:
        """Every prompt of the request.

        Raises:
            ApiError: ``prompt`` is none of what it may be.
        """
        given = self.prompt
        if isinstance(given, list) and given and not any(_is_id(part) for part in given):
            return [_prompt(each) for each in given]
        return [_prompt(given)]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompt(value: Any) -> Prompt:
    match value:
        case str():
            return Prompt([value])
        case {"prompt_string": str() as text, **rest}:
            if rest.get("multimodal_data"):
                raise ApiError(
                    "`prompt.multimodal_data` is not supported: pictures go to /v1/chat/completions",
                    param="prompt.multimodal_data",
                    code="unsupported_parameter",
                )
            return Prompt([text])
        case [_, *_] if all(_is_id(part) or isinstance(part, str) for part in value):
            return Prompt(value)
    raise ApiError(f"`prompt` {MIXED}", param="prompt", code="invalid_value")


class InfillFile(ApiModel):
    """A text that stands before the one with the gap."""

    text: str
    filename: str | None = None
    time: Any = None  # when a client has read it


class LlamaInfillRequest(LlamaSampling):
    """POST /infill."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[InfillFile], Field(fail_fast=True), at_most(MAX_EXTRA)] | None = None
    prompt: str | None = None


class LlamaEmbeddingRequest(ApiModel):
    """POST /embedding and /embeddings."""

    model: str | None = None
    content: Inputs | None = None
    input: Inputs | None = None
    embd_normalize: Literal[-1, 2] | None = None
    encoding_format: Literal["float"] | None = None

    @property
    def given(self) -> tuple[str, Inputs]:
        """The field that has the texts, and what it has; raises ``ApiError`` unless there is one."""
        if (self.content is None) == (self.input is None):
            raise ApiError("one of `content` and `input` is required", param="content", code="invalid_value")
        return ("input", self.input) if self.input is not None else ("content", self.content or "")


class LlamaTokenizeRequest(ApiModel):
    """POST /tokenize, as llama-server has it."""

    model: str | None = None
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool | None = None
