"""Prompts as dictionaries, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A text, tokenized as it stands; only prompts with the same ``cache_salt`` share cached prefixes.
    ``multi_modal_data`` has images and videos, one for each of the text's placeholders."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids, and the text that they stand for, which outputs show."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]
