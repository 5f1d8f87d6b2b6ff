"""The text of a JSON body whose long strings are decoded while they arrive.

A parser takes a string in one go and holds the interpreter meanwhile: 8 MB are 10 to 50 ms in which no stream gets a
token. So what lies inside a string is decoded chunk by chunk, and the parser meets a mark in its place.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import orjson

BACKSLASH = b"\\"
ESCAPE = 6  # bytes of the longest one, \u0041
HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")  # and another escape make one character
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# Half a pair, or an escaped backslash before the letters of one, which may hide half a pair.
LONE_SURROGATE = re.compile(rb"%s(?!%s)|(?<!%s)%s|\\\\u[dD][89a-fA-F]" % (_HIGH, _LOW, _HIGH, _LOW))
# A pair, or half of one, or any other escape: whether a backslash begins one follows from those before it.
ESCAPES = re.compile(rb"%s%s|(%s|%s)|\\." % (_HIGH, _LOW, _HIGH, _LOW), re.DOTALL)
REPLACEMENT = rb"\ufffd"


def without_lone_surrogates(text: bytes) -> bytes:
    """JSON with U+FFFD for escapes that stand for half a character, which parsers refuse.

    Args:
        text: begins and ends between escapes.
    """
    if not LONE_SURROGATE.search(text):
        return text
    return ESCAPES.sub(lambda found: REPLACEMENT if found[1] else found[0], text)


class JsonText:
    """A JSON text in chunks, whatever their bounds cut in two. Escaped lone surrogates become U+FFFD."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # what the parser gets
        self._rest = b""  # of a string: the beginning of a character that is not complete
        self._strings: list[list[str]] = []  # what it does not get, by the number in the mark
        self._open = False  # the last part is a mark, and what follows it may be added
        self._nonce = secrets.token_hex(16)  # no client can write a mark

    def add(self, chunk: bytes, *, within: bool, inside: bool) -> None:
        """Takes the next bytes.

        Args:
            within: all of them lie in one string that began before them.
            inside: the last of them lies in a string.
        """
        chunk = self._rest + chunk
        end = _complete(chunk) if inside else len(chunk)
        chunk, self._rest = without_lone_surrogates(chunk[:end]), chunk[end:]
        if within:
            try:
                decoded = orjson.loads(b'"' + chunk + b'"')
            except orjson.JSONDecodeError:
                pass  # the parser will say what is wrong with it
            else:
                if not self._open:
                    self._parts.append(f"{self._nonce}{len(self._strings)};".encode())
                    self._strings.append([])
                    self._open = True
                self._strings[-1].append(decoded)
                return
        self._parts.append(chunk)
        self._open = False

    def clear(self) -> None:
        """Keeps nothing of what came."""
        self._parts, self._rest, self._strings, self._open = [], b"", [], False

    @property
    def short(self) -> bytes:
        """For the parser: the text with marks in the place of what was set aside."""
        return b"".join([*self._parts, self._rest])

    @property
    def has_marks(self) -> bool:
        """Whether ``restore`` has anything to do."""
        return bool(self._strings)

    def restore(self, value: Any) -> Any:
        """What the parser made of ``short``, with the strings in the place of their marks."""
        return self._restore(value, re.compile(self._nonce + "([0-9]+);"))

    def _restore(self, value: Any, mark: re.Pattern[str]) -> Any:
        match value:
            case str():
                if self._nonce not in value:
                    return value
                texts = mark.split(value)  # between the marks, and their numbers
                return "".join(
                    part for i, text in enumerate(texts) for part in (self._strings[int(text)] if i % 2 else (text,))
                )
            case list():
                return [self._restore(item, mark) for item in value]
            case dict():
                return {self._restore(key, mark): self._restore(item, mark) for key, item in value.items()}
            case _:
                return value


def _complete(text: bytes) -> int:
    """Up to where the text, of which the end lies in a string, has whole characters and escapes."""
    last = text.rfind(BACKSLASH, max(0, len(text) - ESCAPE))
    if last >= 0 and _begins_escape(text, last):
        pair = HIGH_SURROGATE.search(text, max(0, last - ESCAPE), last)
        return pair.start() if pair is not None and _begins_escape(text, pair.start()) else last
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:  # the first of a character's bytes
            return len(text) - back
    return len(text)


def _begins_escape(text: bytes, at: int) -> bool:
    """Whether the backslash there is not itself escaped: in a run of them every second one is."""
    return (at + 1 - len(text[: at + 1].rstrip(BACKSLASH))) % 2 == 1
