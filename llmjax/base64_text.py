"""Bytes that come as texts in base64."""

from __future__ import annotations

from base64 import b64decode

_URLS = str.maketrans("-_", "+/")  # RFC 4648's second alphabet


def from_base64(text: str) -> bytes:
    """The bytes of a text in base64, whose lines may be broken, whose padding may be missing, and whose alphabet may be
    that of URLs (RFC 2045 and 4648).

    Raises:
        ValueError: it is something else.
    """
    try:
        return b64decode(text, validate=True)
    except ValueError:
        plain = "".join(text.split()).translate(_URLS).rstrip("=")
        return b64decode(plain + "=" * (-len(plain) % 4), validate=True)
