"""POST /v1/completions: the request body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.common import Ints, Strings
from llmjax.serve.protocol.llama_cpp import LlamaCppGeneration

IntLists = Annotated[list[Ints], Field(fail_fast=True)]


class CompletionRequest(LlamaCppGeneration):
    prompt: str | Strings | Ints | IntLists
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    suffix: str | None = None
    prompt_embeds: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **LlamaCppGeneration.neutral_values,
        "prompt_embeds": (),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        **LlamaCppGeneration.reasons,
        "thinking_token_budget": "is not supported here: only chats separate reasoning from the text",
        "prompt_embeds": "is not supported: prompts are text or token ids",
    }

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt of the request, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError("`prompt` is empty", param="prompt", code="invalid_value")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def check_suffix(self) -> None:
        """Raises ``ApiError`` (400) for what cannot be said together with ``suffix``."""
        if not self.suffix:
            return
        for field in ("echo", "truncate_prompt_tokens"):
            if getattr(self, field) not in (None, False):
                raise ApiError(f"`{field}` cannot be combined with suffix", param=field, code="unsupported_parameter")
        if not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ApiError("with suffix a prompt must be a text", param="prompt", code="invalid_value")

    @property
    def prompt_only(self) -> bool:
        """``echo`` with ``max_tokens=0``: score the prompt, generate nothing."""
        return self.echo and self.max_tokens == 0

    @property
    def scores_echo(self) -> bool:
        """The answer shows the prompt with its log-probabilities."""
        return self.echo and self.logprobs is not None
