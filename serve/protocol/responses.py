"""POST /v1/responses: the request body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmjax.serve.protocol.chat import MAX_MESSAGES
from llmjax.serve.protocol.common import ApiModel, GenerationRequest, Strings, at_most
from llmjax.serve.protocol.tools import MAX_TOOLS

# What a request may ask to have in its response. What belongs to tools that OpenAI runs changes nothing here.
LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        SEALED,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)


class ReasoningOptions(ApiModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(ApiModel):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


Items = Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1), at_most(MAX_MESSAGES)]


class InputRequest(GenerationRequest):
    """What is read: shared by responses and the counting of their tokens."""

    input: str | Items
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Any = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class ResponsesRequest(InputRequest):
    max_output_tokens: int | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # of tools that OpenAI runs: there are none
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    include: Annotated[Strings, at_most(len(INCLUDABLE))] | None = None
    background: bool | None = None
    client_metadata: Any = None  # what Codex says of itself, for OpenAI

    enable_response_messages: Any = None
    previous_input_messages: Any = None
    previous_response: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{name: ok for name, ok in GenerationRequest.neutral_values.items() if name != "thinking_token_budget"},
        "n": (1,),
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "max_tokens": (),
        "response_format": (),
        "prompt_logprobs": (),
        "return_token_ids": (False,),
        "return_prompt_text": (False,),
        "return_tokens_as_token_ids": (False,),
        "truncate_prompt_tokens": (),
        "truncation_side": (),
        "truncation": ("disabled",),
        "enable_response_messages": (False,),
        "previous_input_messages": ([],),
        "previous_response": (),
        "conversation": (),
        "prompt": (),
        "moderation": (),
    }
    hints: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "context_management": ([],),
        "prompt_cache_options": ({},),
        "prompt_cache_retention": ("in_memory",),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        **GenerationRequest.reasons,
        "n": "is not supported: a response is one answer",
        "best_of": "is not supported: a response is one answer",
        "use_beam_search": "is not supported: a response is one answer",
        "length_penalty": "belongs to beam search, which is not supported here",
        "max_tokens": "is called `max_output_tokens` here",
        "response_format": "is called `text.format` here",
        "prompt_logprobs": "is not supported here; /v1/chat/completions has it",
        "return_token_ids": "is not supported here; /v1/chat/completions has it",
        "return_prompt_text": "is not supported here; /v1/chat/completions has it",
        "return_tokens_as_token_ids": "is not supported here; /v1/chat/completions has it",
        "truncate_prompt_tokens": "is not supported here; send fewer items",
        "truncation_side": "is not supported here; send fewer items",
        "truncation": 'must be "disabled": items are not dropped; send fewer of them',
        "enable_response_messages": "is not supported; /v1/chat/completions has return_prompt_text",
        "previous_input_messages": "is not supported: send the items of earlier turns in `input`",
        "previous_response": "is not supported: send its items in `input`, or use previous_response_id",
        "conversation": "is not supported; previous_response_id continues an earlier response",
        "prompt": "is not supported: there are no stored prompts; send instructions and input",
        "moderation": "is not supported: answers are not judged",
    }

    def without_effect(self) -> list[str]:
        reasoning, text = self.reasoning, self.text
        asked = {
            "reasoning.summary": reasoning is not None and bool(reasoning.summary or reasoning.generate_summary),
            "text.verbosity": text is not None and text.verbosity in ("low", "high"),
        }
        names = [name for name in super().without_effect() if name != "store"]
        return [*names, *(name for name, wanted in asked.items() if wanted)]

    @property
    def stored(self) -> bool:
        """OpenAI's default is to store."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or self.includes(LOGPROBS)

    def includes(self, what: str) -> bool:
        return what in (self.include or ())


class InputTokensRequest(InputRequest):
    """What of a response may be sent to have its input counted."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"truncation": ("disabled",), "response_format": ()}
    reasons: ClassVar[Mapping[str, str]] = {
        name: ResponsesRequest.reasons[name] for name in ("truncation", "response_format")
    }
