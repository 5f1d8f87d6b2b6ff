"""Ids of calls in the form of Anthropic's: ``toolu_`` and letters, digits, ``_`` and ``-``, as its clients check."""

from __future__ import annotations

import base64
import binascii

OURS, PREFIX, WRITTEN = "call_", "toolu_", "toolu_own_"


def shown_id(id: str) -> str:
    """What a call's id is called in a message. One that a model has written itself is kept inside."""
    if id.startswith(OURS):
        return PREFIX + id.removeprefix(OURS)
    return WRITTEN + base64.urlsafe_b64encode(id.encode()).decode().rstrip("=")


def read_id(id: str) -> str:
    """The id of a call as the model knows it."""
    if not id.startswith(WRITTEN):
        return id
    data = id.removeprefix(WRITTEN)
    try:
        return base64.b64decode(data + "=" * (-len(data) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return id
