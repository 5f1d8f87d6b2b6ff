"""Prompts as dictionaries, under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A text, tokenized as it stands; only prompts with the same ``cache_salt`` share cached prefixes."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids, and the text that they stand for, which outputs show."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
