"""Arguments of calls in a conversation, which a model has written: mostly, but not always, an object of JSON.

A client sends back what it was given, with each request that follows, so nothing that stands there may end a
conversation.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llmjax.characters import whole_characters

MAX_DEPTH = 64  # of objects and lists in each other; what is deeper stays text
_FENCED = re.compile(r"\s*```\w*\s(?P<inner>.*?)\s*```\s*", re.DOTALL)
# Strings end where the text does if nothing closes them, so that each character is looked at once.
_PIECE = re.compile(
    r"""
      (?P<double> "(?:\\.|[^"\\])*+ (?:"|\Z) )
    | ' (?P<single> (?:\\.|[^'\\])*+ ) (?:'|\Z)
    | ,(?=\s*+[}\]]) (?P<comma>)
    | \b(?P<word> True|False|None )\b
    """,
    re.DOTALL | re.VERBOSE,
)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_IN_SINGLE = re.compile(r"""\\(?P<quote>')|(?P<escape>\\.)|(?P<bare>")""", re.DOTALL)


def read_arguments(arguments: Any) -> dict[str, Any] | str:
    """The arguments as an object, or as the text that they are where no object can be read.

    What models get wrong is mended where there is one way to read it: trailing commas, single quotes, line ends in
    strings, Python's words, code fences, an object in a string of JSON.

    Args:
        arguments: text, or what a client has made of it; None and white space mean that there are none.
    """
    text = arguments if isinstance(arguments, str) else None
    if arguments is None or (text is not None and not text.strip()):
        return {}
    parsed = arguments if text is None else _object(text)
    if isinstance(parsed, dict) and not _too_deep(parsed):
        whole: dict[str, Any] = _whole(parsed)
        return whole
    return whole_characters(json.dumps(arguments, ensure_ascii=False) if text is None else text)


def _object(text: str) -> dict[str, Any] | None:
    """The object that a text is; None: it is none."""
    for read in (text, _mended(text)):
        try:
            value = json.loads(read, strict=False)
            if isinstance(value, str):
                value = json.loads(value, strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
        if value is None or value == []:  # other languages' empty objects
            return {}
    return None


def _mended(text: str) -> str:
    """A text with JSON's way of writing what others are known for."""
    fenced = _FENCED.fullmatch(text)
    return _PIECE.sub(_piece, text if fenced is None else fenced["inner"])


def _piece(piece: re.Match[str]) -> str:
    if piece["single"] is not None:
        return f'"{_IN_SINGLE.sub(_quoted, piece["single"])}"'
    if piece["comma"] is not None:
        return ""
    return piece["double"] or _WORDS[piece["word"]]


def _quoted(part: re.Match[str]) -> str:
    return "'" if part["quote"] else part["escape"] or '\\"'


def _too_deep(value: Any) -> bool:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            return True
        level = [item for part in level for item in (part.values() if isinstance(part, dict) else part)]
    return False


def _whole(value: Any) -> Any:
    """The value without halves of characters, which JSON can write and no prompt can hold."""
    match value:
        case str():
            return whole_characters(value)
        case dict():
            return {whole_characters(key): _whole(item) for key, item in value.items()}
        case list():
            return [_whole(item) for item in value]
        case _:
            return value
