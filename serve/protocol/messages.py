"""POST /v1/messages: the request body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmjax.serve.protocol.chat import MAX_MESSAGES, Thinking
from llmjax.serve.protocol.common import ApiModel, Ints, Name, Strings, at_most
from llmjax.serve.protocol.tools import MAX_TOOLS, MCP_ELSEWHERE

Blocks = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class OutputConfig(ApiModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class Metadata(ApiModel):
    user_id: Name | None = None


class CountTokensRequest(ApiModel):
    """What is read: shared by messages and the counting of their tokens."""

    model: str | None = None
    messages: Annotated[Blocks, Field(min_length=1), at_most(MAX_MESSAGES)]
    system: str | Annotated[Blocks, at_most(MAX_MESSAGES)] | None = None
    tools: Annotated[Blocks, at_most(MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Without effect: of caching, which goes by itself, and of services that are not this server's.
    cache_control: Any = None
    context_management: Any = None
    mcp_servers: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mcp_servers": ([],)}
    reasons: ClassVar[Mapping[str, str]] = {"mcp_servers": f"is not supported here: {MCP_ELSEWHERE}"}
    hints: ClassVar[Mapping[str, tuple[Any, ...]]] = {"context_management": ({},)}


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: Strings | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    # vLLM's.
    seed: int | None = None
    stop_token_ids: Ints | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    container: Any = None
    inference_geo: Any = None
    speed: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CountTokensRequest.neutral_values,
        "container": (),
        "inference_geo": (),
    }
    hints: ClassVar[Mapping[str, tuple[Any, ...]]] = {**CountTokensRequest.hints, "speed": ("standard",)}
    reasons: ClassVar[Mapping[str, str]] = {
        **CountTokensRequest.reasons,
        "container": "is not supported: the server runs no tools",
        "inference_geo": "is not supported: the server runs in one place",
    }
