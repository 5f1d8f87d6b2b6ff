"""POST /tokenize and /detokenize: the request bodies, in vLLM's shapes."""

from __future__ import annotations

from llmjax.serve.protocol.chat import ChatTemplateFields
from llmjax.serve.protocol.common import ApiModel, Ints


class TokenizeTextRequest(ApiModel):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatTemplateFields):
    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: Ints
