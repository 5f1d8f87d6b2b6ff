"""POST /inference/v1/generate and /generative_scoring: the request bodies, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmjax.sampling.params import MAX_SCORED, PARAM_NAMES
from llmjax.serve.errors import ApiError, cut
from llmjax.serve.protocol.chat import TEXT_ONLY
from llmjax.serve.protocol.common import ApiModel, Ints, StreamOptions, Strings, at_most
from llmjax.serve.protocol.completions import CompletionRequest, IntLists

# Fields of SamplingParams that a request may set.
SAMPLING = PARAM_NAMES - {"output_kind", "kv_transfer", "guided_decoding", "detokenize"}
# What vLLM writes of its own beside them.
UNREAD = frozenset({"output_kind", "skip_clone", "detokenize", "routed_experts_prompt_start"})
NEUTRAL: Mapping[str, tuple[Any, ...]] = {"flat_logprobs": (False,), "extra_args": ({},), "watermarking": (False,)}
MOST_ITEMS = 2**14


class GenerateRequest(ApiModel):
    """Token ids, and how to go on from there."""

    token_ids: Annotated[list[int], Field(fail_fast=True, min_length=1)]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    token_offsets: Any = None  # of the rendered request, for its client

    features: Any = None
    content_parts: Any = None
    ec_transfer_params: Any = None
    reasoning_ended: Any = None
    reasoning_parser_kwargs: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "features": (),
        "content_parts": ([],),
        "ec_transfer_params": ({},),
        "reasoning_ended": (True,),
        "reasoning_parser_kwargs": ({},),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("features", "content_parts", "ec_transfer_params"), TEXT_ONLY),
        "reasoning_ended": "is not supported: structured_outputs.after says what stands before a form",
        "reasoning_parser_kwargs": "is not supported: structured_outputs.after says what stands before a form",
    }

    def completion(self, *, max_tokens: int) -> dict[str, Any]:
        """The fields of the completion that this comes to.

        Args:
            max_tokens: where the request does not say.

        Raises:
            ApiError: it has a sampling parameter that is not known.
        """
        fields = {"max_tokens": max_tokens}
        for name, value in self.sampling_params.items():
            if value is None or name in UNREAD or name.startswith("_") or value in NEUTRAL.get(name, ()):
                continue
            if name not in SAMPLING:
                path = f"sampling_params.{cut(name)}"
                raise ApiError(f"unknown field `{path}`", param=path, code="unknown_parameter")
            fields[name] = value
        shared = ("model", "stream", "stream_options", "cache_salt", "priority", "request_id", "kv_transfer_params")
        return {"prompt": self.token_ids, **fields, **{name: getattr(self, name) for name in shared}}


# The names of a completion's fields here, for errors.
NAMES = {"prompt": "token_ids", **{name: f"sampling_params.{name}" for name in sorted(SAMPLING)}}
assert NAMES.keys() - {"prompt"} <= CompletionRequest.model_fields.keys()


class GenerativeScoringRequest(ApiModel):
    """A question, items, and tokens that may be the answer."""

    model: str | None = None
    query: str | Ints
    items: Annotated[Strings | IntLists, at_most(MOST_ITEMS)]
    label_token_ids: Annotated[Ints, Field(min_length=1), at_most(MAX_SCORED)]
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
