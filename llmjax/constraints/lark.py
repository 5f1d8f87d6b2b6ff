"""Pieces of grammars in Lark: expressions, and markers of model families, parts of which may be special tokens, which
no text matches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from llmjax.errors import InvalidRequest


@dataclass(frozen=True)
class Markers:
    """How markers are written in a grammar.

    Args:
        cut: a marker as texts and ids of special tokens, in order.
    """

    cut: Callable[[str], list[int | str]]

    def literal(self, marker: str) -> str:
        """What matches a marker."""
        return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in self.cut(marker))

    def text_until(self, name: str, marker: str) -> str:
        """A rule for free text (``TEXT``) up to and with a marker: the first one that comes."""
        first, *rest = self.cut(marker)
        behind = " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in rest)
        if isinstance(first, int):
            return f"{name}: TEXT <[{first}]> {behind}"
        return f"{name}: {name}_text {behind}\n{name}_text[lazy]: TEXT {json.dumps(first)}"


def lark_regex(expression: str) -> str:
    """An expression as a terminal of Lark."""
    text: str = json.loads(LLMatcher.grammar_from_regex(expression))["grammars"][0]["lark_grammar"]
    return text.removeprefix("start: ")


def lark_of(grammar: str) -> str:
    """A grammar in Lark, GBNF or EBNF as Lark.

    Raises:
        InvalidRequest: it is none of them.
    """
    if is_lark_syntax(grammar):
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the translation raises whatever its own code comes upon
        raise InvalidRequest(f"grammar cannot be read: {error}") from error
