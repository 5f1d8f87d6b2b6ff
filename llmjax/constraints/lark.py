"""Parts of Lark grammars: expressions, and markers of model families, which may contain special tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from llmjax.errors import InvalidRequest


@dataclass(frozen=True)
class Markers:
    """Writes markers in a grammar.

    Args:
        cut: splits a marker into texts and ids of special tokens, in order.
    """

    cut: Callable[[str], list[int | str]]

    def literal(self, marker: str) -> str:
        """An expression that matches a marker."""
        return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in self.cut(marker))

    def text_until(self, name: str, marker: str) -> str:
        """A rule for free text (``TEXT``) up to and including the first marker."""
        first, *rest = self.cut(marker)
        behind = " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in rest)
        if isinstance(first, int):
            return f"{name}: TEXT <[{first}]> {behind}"
        return f"{name}: {name}_text {behind}\n{name}_text[lazy]: TEXT {json.dumps(first)}"


def lark_regex(expression: str) -> str:
    """A regular expression as a Lark terminal."""
    text: str = json.loads(LLMatcher.grammar_from_regex(expression))["grammars"][0]["lark_grammar"]
    return text.removeprefix("start: ")


def lark_of(grammar: str) -> str:
    """Converts a grammar in Lark, GBNF or EBNF to Lark.

    Raises:
        InvalidRequest: it is in none of these languages.
    """
    if is_lark_syntax(grammar):
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the translation may raise any exception
        raise InvalidRequest(f"grammar cannot be read: {error}") from error
