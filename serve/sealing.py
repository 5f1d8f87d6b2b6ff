"""Reasoning that clients keep and send back without looking at it."""

from __future__ import annotations

import base64
import binascii

SEAL = "llmjax-reasoning:"


def sealed(text: str) -> str:
    """OpenAI's ``encrypted_content``, Anthropic's ``signature``. Clients may see the text, so it is only encoded."""
    return base64.b64encode((SEAL + text).encode()).decode()


def unsealed(content: str) -> str | None:
    """What ``sealed`` has sealed; None: another server has."""
    try:
        text = base64.b64decode(content, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return text.removeprefix(SEAL) if text.startswith(SEAL) else None
