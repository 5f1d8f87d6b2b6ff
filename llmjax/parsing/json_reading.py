"""JSON read as it comes: where a value ends, and calls that are JSON objects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from llmjax.characters import whole_characters
from llmjax.parsing.source import Reading, Source

_PLAIN = re.compile(r'[^"{}\[\]<|`;]*')  # between strings and brackets; the others do not belong to JSON
_IN_STRING = re.compile(r'[^"\\]*')
_ATOM = re.compile(r"[\w.+-]*")


def json_value(source: Source, emit: Callable[[str], None]) -> Reading[None]:
    """Reads one value, as it is written, up to its end or to what cannot be JSON.

    Args:
        emit: gets the text, piece by piece.
    """
    char = yield from source.spaces()
    if char == '"':
        yield from _string(source, emit)
        return None
    if char not in ("{", "["):
        return (yield from _run(source, _ATOM, emit))
    depth = 0
    while char := (yield from source.peek()):
        if char == '"':
            yield from _string(source, emit)
        elif char in "{[":
            depth += 1
            emit(source.take(source.at + 1))
        elif char in "}]":
            depth -= 1
            emit(source.take(source.at + 1))
            if depth == 0:
                return None
        elif char in "<|`;":
            return None
        else:
            yield from _run(source, _PLAIN, emit)
    return None


def json_string(source: Source) -> Reading[tuple[str, bool]]:
    """Reads a string and returns what it says, and whether it has an end."""
    pieces: list[str] = []
    whole = yield from _string(source, pieces.append)
    text = "".join(pieces)
    try:
        return whole_characters(str(json.loads(text if whole else text + '"', strict=False))), whole
    except ValueError:  # an escape that JSON does not have, or half of one
        return text.strip('"'), whole


def _string(source: Source, emit: Callable[[str], None]) -> Reading[bool]:
    """Whether it has an end."""
    emit(source.take(source.at + 1))
    while True:
        yield from _run(source, _IN_STRING, emit)
        char = yield from source.peek()
        if char == "\\":
            while source.at + 1 == len(source.text) and not source.closed:
                yield
            emit(source.take(source.at + 2))
        else:
            if char:
                emit(source.take(source.at + 1))
            return bool(char)


def _run(source: Source, pattern: re.Pattern[str], emit: Callable[[str], None]) -> Reading[None]:
    while True:
        match = pattern.match(source.text, source.at)
        assert match is not None
        if match.end() > source.at:
            emit(source.take(match.end()))
        if source.at < len(source.text) or source.closed:
            return
        yield
