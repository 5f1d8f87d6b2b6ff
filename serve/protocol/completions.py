"""POST /v1/completions: the request body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.common import GenerationRequest, Ints, Strings

IntLists = Annotated[list[Ints], Field(fail_fast=True)]


class CompletionRequest(GenerationRequest):
    prompt: str | Strings | Ints | IntLists
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    suffix: Any = None
    prompt_embeds: Any = None

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.neutral_values,
        "suffix": ("",),
        "prompt_embeds": (),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        **GenerationRequest.reasons,
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

    @property
    def prompt_only(self) -> bool:
        """``echo`` with ``max_tokens=0``: score the prompt, generate nothing."""
        return self.echo and self.max_tokens == 0

    @property
    def scores_echo(self) -> bool:
        """The answer shows the prompt with its log-probabilities."""
        return self.echo and self.logprobs is not None
