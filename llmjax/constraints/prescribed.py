"""How much a form prescribes, found out before any work begins, by its texts and counts as they stand.

What has to come is walked through at every step: ``x{100000000}`` would keep each of them busy, and no answer can be
that long. What may come costs nothing, so highest counts (``{0,100000000}``, ``maxLength``) have no limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.errors import InvalidRequest

MOST_PRESCRIBED = 2**14  # characters or parts in a row, counts multiplied by those around them

_COUNTS = frozenset({"minLength", "minItems", "minProperties", "minContains"})
_TEXTS = frozenset({"const", "enum"})
_DATA = _TEXTS | {"default", "examples"}  # what is in them is not a schema
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
        InvalidRequest: it prescribes more than may be.
    """
    if len(expression) <= MOST_PRESCRIBED and _COUNTED.search(expression) is None:
        return
    # Of each group that is open: what its alternative now has in a row, and the longest of those before.
    groups, last = [[0, 0]], 0
    for piece in _IN_EXPRESSION.finditer(expression):
        match piece.lastgroup:
            case "open":
                groups.append([0, 0])
            case "either":
                groups[-1] = [0, max(groups[-1])]
            case "close":
                # One that was not opened is the library's to tell.
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
    """Checks the texts, expressions and counts of a grammar; raises as ``check_expression``. What rules make of each
    other, the library limits."""
    for piece in _IN_LARK.finditer(grammar):
        if (expression := piece["expression"]) is not None:
            check_expression(expression)
        elif len(piece["text"] or "") > MOST_PRESCRIBED or int((piece["least"] or "0")[:20]) > MOST_PRESCRIBED:
            raise _too_much("a grammar")


def check_schema(schema: Any) -> None:
    """Checks a schema, or what schemas are in; raises as ``check_expression``."""
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
    """Checks texts of which one is to be written; raises as ``check_expression``."""
    _check_texts("choice", choices)


def _check_texts(name: str, value: Any) -> None:
    texts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(text, str) and len(text) > MOST_PRESCRIBED for text in texts):
        raise _too_much(name)


def _too_much(what: str) -> InvalidRequest:
    return InvalidRequest(f"{what} prescribes more than {MOST_PRESCRIBED} characters or parts in a row")
