"""Texts that UTF-8 can hold."""

from __future__ import annotations


def whole_characters(text: str) -> str:
    """A text with U+FFFD for lone surrogates: JSON's escapes can write them, UTF-8 has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
