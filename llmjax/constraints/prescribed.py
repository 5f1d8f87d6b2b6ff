"""Limits how much text a form of output requires, computed from its texts and counts before any work begins.

Every step walks through the required text: ``x{100000000}`` would make each step slow, and no answer can be that long.
Optional text costs nothing, so upper counts (``{0,100000000}``, ``maxLength``) have no limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.errors import InvalidRequest

MOST_PRESCRIBED = 2**14  # characters or parts in a row, with nested counts multiplied

_COUNTS = frozenset({"minLength", "minItems", "minProperties", "minContains"})
_TEXTS = frozenset({"const", "enum"})
_DATA = _TEXTS | {"default", "examples"}  # their values are not schemas
_IN_EXPRESSION = re.compile(
    r"""
      (?P<open> \( (?: \? (?: P? < [^>]{0,64} > | [A-Za-z-]{0,16} :? ) )? ) | (?P<close> \) ) | (?P<either> \| )
    | \{ \s* (?P<least> \d+ ) [\d\s,]* \} \?? | (?P<optional> (?: [?*] | \{ \s* , [\d\s]* \} ) \?? )
    | (?P<once> \+ \?? )
    | (?P<plain> [^][\\(){}|?*+]+ (?! [{?*] ) )
    | \\ (?: [pPxu] \{ [^}]{0,64} \} | . ) | \[ \^? \]? (?: \\. | [^]\\] )*+ (?: \] | \Z ) | .
    """,
    re.DOTALL | re.VERBOSE,
)
_COUNTED = re.compile(r"\{\s*\d")
_IN_LARK = re.compile(
    r"""
      // [^\n]* | \# [^\n]* | \[ (?: \\. | [^]\\\n] )*+
    | (?P<text> " (?: \\. | [^"\\\n] )*+ "? )
    | / (?P<expression> (?: \\. | [^/\\\n] )++ ) /?
    | (?: \{ | ~ ) \s* (?P<least> \d+ )
    """,
    re.DOTALL | re.VERBOSE,
)


def check_expression(expression: str) -> None:
    """Checks an expression.

    Raises:
        InvalidRequest: it requires too much text.
    """
    if len(expression) <= MOST_PRESCRIBED and _COUNTED.search(expression) is None:
        return
    # For each open group: the length of its current alternative, and the longest of the earlier ones.
    groups, last = [[0, 0]], 0
    for piece in _IN_EXPRESSION.finditer(expression):
        match piece.lastgroup:
            case "open":
                groups.append([0, 0])
            case "either":
                groups[-1] = [0, max(groups[-1])]
            case "close":
                # The library reports a group that was not opened.
                last = max(groups.pop()) if len(groups) > 1 else 0
                groups[-1][0] += last
            case "least":
                groups[-1][0] += last * (int(piece["least"][:20]) - 1)
                last *= int(piece["least"][:20])
            case "optional":
                groups[-1][0] -= last
                last = 0
            case "once":
                pass
            case "plain":
                last = 1
                groups[-1][0] += len(piece[0])
            case _:
                last = 1
                groups[-1][0] += last
        if groups[-1][0] > MOST_PRESCRIBED:
            raise _too_much("an expression")


def check_lark(grammar: str) -> None:
    """Checks the texts, expressions and counts of a grammar; raises like ``check_expression``.

    The library limits what rules produce together.
    """
    for piece in _IN_LARK.finditer(grammar):
        if (expression := piece["expression"]) is not None:
            check_expression(expression)
        elif len(piece["text"] or "") > MOST_PRESCRIBED or int((piece["least"] or "0")[:20]) > MOST_PRESCRIBED:
            raise _too_much("a grammar")


def check_schema(schema: Any) -> None:
    """Checks a schema, or a list or object of schemas; raises like ``check_expression``."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            for name, value in part.items():
                if name in _COUNTS and isinstance(value, int | float) and value > MOST_PRESCRIBED:
                    raise InvalidRequest(f"{name} is {value}; at most {MOST_PRESCRIBED} can be required")
                if name in _TEXTS:
                    _check_texts(name, value)
                elif name == "pattern" and isinstance(value, str):
                    check_expression(value)
                elif name == "patternProperties" and isinstance(value, Mapping):
                    for expression in value:
                        check_expression(expression)
            waiting += [value for name, value in part.items() if name not in _DATA]
        elif isinstance(part, Sequence) and not isinstance(part, str):
            waiting += part


def check_choices(choices: Sequence[str]) -> None:
    """Checks alternative texts; raises like ``check_expression``."""
    _check_texts("choice", choices)


def _check_texts(name: str, value: Any) -> None:
    texts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(text, str) and len(text) > MOST_PRESCRIBED for text in texts):
        raise _too_much(name)


def _too_much(what: str) -> InvalidRequest:
    return InvalidRequest(f"{what} prescribes more than {MOST_PRESCRIBED} characters or parts in a row")
