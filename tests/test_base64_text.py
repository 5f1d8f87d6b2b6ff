"""Texts in base64, in the forms that clients write."""

from __future__ import annotations

from base64 import b64encode, encodebytes, urlsafe_b64encode

import pytest

from llmjax.base64_text import from_base64

DATA = bytes(range(256)) * 3 + b"\xff"


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 255, len(DATA)])
def test_forms(length: int) -> None:
    data = DATA[-length:] if length else b""
    whole, urls, lines = (write(data).decode() for write in (b64encode, urlsafe_b64encode, encodebytes))
    for text in (whole, whole.rstrip("="), urls, urls.rstrip("="), lines, lines.replace("\n", "\r\n"), f" {whole}\n"):
        assert from_base64(text) == data


@pytest.mark.parametrize("text", ["%%%", "A", "AAAA=AAA", "AA==AA", "AAAA!", "\u00e9AAA", "AAAA%2B=="])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"base64|padding|ASCII|data"):
        from_base64(text)
