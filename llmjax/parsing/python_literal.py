"""Python literals as JSON: read by rules of our own, nothing is evaluated."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 64
MAX_DIGITS = 400  # of a number; Python takes quadratic time for more

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:[eE][-+]?\d+)?)
    |(?P<word>[A-Za-z]\w*)
    |[bruBRU]{0,2}(?P<string>'''(?:[^\\]|\\.)*?'''|\"\"\"(?:[^\\]|\\.)*?\"\"\"|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<mark>[][(){},:])
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:\r?\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\\": "\\", "'": "'", '"': '"'}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def literal(text: str) -> Any:
    """The value of a literal, with the words of JSON allowed too; tuples and sets become lists.

    Raises:
        ValueError: it is not one, or is nested too deep.
    """
    reader = _Reader(text)
    value = reader.value(depth=0)
    if reader.text[reader.at :].strip():
        raise ValueError("text after the literal")
    return value


def json_of_literal(text: str) -> str:
    """A literal as JSON; what is not one becomes a string of its text."""
    try:
        return json.dumps(literal(text), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(text.strip(), ensure_ascii=False)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def value(self, *, depth: int) -> Any:
        match = self._token()
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        match match.lastgroup:
            case "number":
                return _number(match["number"])
            case "word":
                if match["word"] not in _WORDS:
                    raise ValueError("a name")
                return _WORDS[match["word"]]
            case "string":
                return _string(match["string"])
            case _ if match["mark"] in _CLOSING:
                return self._container(match["mark"], depth=depth)
        raise ValueError("not a literal")

    def _container(self, opening: str, *, depth: int) -> Any:
        closing = _CLOSING[opening]
        items: list[Any] = []
        keys: list[Any] = []
        commas = False
        while not self._takes(closing):
            item = self.value(depth=depth + 1)
            if opening == "{" and self._takes(":"):
                keys.append(item)
                item = self.value(depth=depth + 1)
            items.append(item)
            if not self._takes(","):
                if not self._takes(closing):
                    raise ValueError(f"{opening} is not closed")
                break
            commas = True
        if opening == "{" and len(keys) == len(items):
            return {_key(key): item for key, item in zip(keys, items, strict=True)}
        if keys:
            raise ValueError("a dictionary with a missing key")
        return items[0] if opening == "(" and len(items) == 1 and not commas else items

    def _token(self) -> re.Match[str]:
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            raise ValueError("not a literal")
        self.at = match.end()
        return match

    def _takes(self, mark: str) -> bool:
        match = _TOKEN.match(self.text, self.at)
        if match is None or match["mark"] != mark:
            return False
        self.at = match.end()
        return True


def _key(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list):
        raise ValueError("a key that JSON does not have")
    return json.dumps(value)


def _number(text: str) -> int | float:
    if len(text) > MAX_DIGITS:
        raise ValueError("too many digits")
    return float(text) if re.search(r"[.eE]", text) else int(text)


def _string(text: str) -> str:
    quotes = 3 if text[:3] in ("'''", '"""') and len(text) >= 6 else 1
    return _ESCAPE.sub(_unescaped, text[quotes:-quotes])


def _unescaped(match: re.Match[str]) -> str:
    text = match[0][1:]
    if text in ("\n", "\r\n"):
        return ""
    if text[0] in "xuU" and len(text) > 1:
        code = int(text[1:], 16)
        return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else "\ufffd"
    if text[0] in "01234567":
        return chr(int(text, 8))
    return _PLAIN.get(text, match[0])
