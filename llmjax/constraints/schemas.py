"""Finds the parts of a JSON Schema that can be enforced, keyword by keyword, so that an error names its place.

Clients send schemas that others have written: with look-around in expressions, references without a target, or lists
in place of objects. For one of these the library refuses the whole form, and does not say where it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from llmjax.constraints.closing import CHOICES, NAMED, ONE, SEVERAL
from llmjax.constraints.finite import target, with_finite_values
from llmjax.constraints.prescribed import check_schema
from llmjax.errors import InvalidRequest

# Keywords without an effect on validity. "$schema" names a version, which the library does not need.
_NOTES = frozenset(
    {"$schema", "title", "description", "default", "example", "examples", "$comment", "deprecated", "x-guidance"}
)
_LISTS = CHOICES | {"allOf", "prefixItems"}
_SINGLE = ONE | {"not", "if", "then", "else", "unevaluatedProperties", "unevaluatedItems", "contentSchema"}
_BY_NAME = NAMED | {"dependentSchemas"}
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_MOST = 2.0**63  # limit for bounds
_KEPT_CHARS = 512  # longest question to the library whose answer is remembered


def enforceable(schema: Any, *, lenient: bool, repair: bool = False) -> Any:
    """The schema with only the parts that can be enforced.

    Args:
        schema: a JSON Schema; it is not changed.
        lenient: whether keywords that the library does not know may stay; it ignores them.
        repair: whether to leave out parts that the library refuses, which is an error otherwise.

    Raises:
        InvalidRequest: a part is wrong, and the message names its place; or no finite text is valid, repaired or not.
    """
    return with_finite_values(_Reader(schema, lenient=lenient, repair=repair).read(schema, ""))


class _Reader:
    """Reads a schema from its root."""

    def __init__(self, root: Any, *, lenient: bool, repair: bool) -> None:
        self._root = root
        self._lenient = lenient
        self._repair = repair
        self._named = _has_names(root)

    def read(self, schema: Any, path: str) -> Any:
        """The enforceable part of a schema at a place, such as ``properties.city``."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._fault(path, "is neither an object nor a boolean")
            return True
        kept: dict[str, Any] = {}
        plain: dict[str, Any] = {}  # the part that the library can check without the rest
        for keyword in sorted(schema, key=lambda name: name != "type"):
            value, place = schema[keyword], f"{path}.{keyword}" if path else keyword
            if keyword in _NOTES:
                continue
            if (reason := self._reason(keyword, value, plain)) is not None:
                self._fault(place, reason)
                if keyword == "patternProperties":  # properties that they allowed must not be forbidden
                    kept["additionalProperties"] = True
            elif keyword != "additionalProperties" or keyword not in kept:
                kept[keyword] = self._inside(keyword, value, place)
        return kept

    def _inside(self, keyword: str, value: Any, path: str) -> Any:
        """A keyword's value, with the enforceable parts of the schemas in it."""
        if keyword in _BY_NAME:
            return {name: self.read(part, f"{path}.{name}") for name, part in value.items()}
        if keyword in _LISTS or (keyword in SEVERAL and isinstance(value, list)):
            return [self.read(part, f"{path}.{i}") for i, part in enumerate(value)]
        return self.read(value, path) if keyword in _SINGLE else value

    def _reason(self, keyword: str, value: Any, plain: dict[str, Any]) -> str | None:
        """The problem with a keyword; None: there is none."""
        if keyword in _BY_NAME:
            if not isinstance(value, dict):
                return "is not an object"
            patterns = value if keyword == "patternProperties" else ()
            return next((reason for name in patterns if (reason := self._refused({"pattern": name}))), None)
        if keyword in _LISTS:
            return None if isinstance(value, list) and value else "is not a list of schemas"
        if keyword in _SINGLE and isinstance(value, dict | bool | list):
            return self._refused({keyword: True}) or None
        match keyword:
            case "required":
                texts = isinstance(value, list) and all(isinstance(name, str) for name in value)
                return None if texts else "is not a list of names"
            case "$ref":
                return None if self._leads_somewhere(value) else "leads to nothing"
        if not _finite(value):
            return "has a number that is too large"
        if keyword in _BOUNDS and _is_number(value) and not _within(keyword, value, plain.get("type")):
            return "is beyond 64 bits"
        try:
            check_schema({keyword: value})
        except InvalidRequest as error:
            return str(error)
        reason = self._refused({**plain, keyword: value})
        if reason and not reason.startswith("Unsatisfiable"):  # it may be optional, so it is allowed
            return reason
        plain[keyword] = value
        return None

    def _refused(self, schema: Mapping[str, Any]) -> str:
        options = {"lenient": self._lenient, "coerce_one_of": True}
        text = json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})
        return _refusal(text) if len(text) < _KEPT_CHARS else _refusal.__wrapped__(text)

    def _leads_somewhere(self, reference: Any) -> bool:
        if not isinstance(reference, str):
            return False
        if self._named:  # the library resolves named references
            return True
        if not reference.startswith("#"):
            return False
        return isinstance(target(self._root, reference), dict | bool)

    def _fault(self, path: str, reason: str) -> None:
        if not self._repair:
            raise InvalidRequest(f"{path or 'the schema'}: {reason}")


@lru_cache(maxsize=4096)
def _refusal(grammar: str) -> str:
    """The library's first objection to a grammar, before it makes an automaton, in one line; empty: none."""
    message: str = LLMatcher.validate_grammar(grammar)
    lines = [line.strip() for line in message.splitlines()]
    told = next(
        (line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0] if lines else ""
    )
    return told[:200]


def _has_names(schema: Any) -> bool:
    """Whether it contains schemas with names that references may use."""
    level = [schema]
    while level:
        part = level.pop()
        if isinstance(part, dict):
            if part.keys() & {"$id", "$anchor", "$dynamicAnchor"}:
                return True
            level += part.values()
        elif isinstance(part, list):
            level += part
    return False


def _finite(value: Any) -> bool:
    level = [value]
    while level:
        part = level.pop()
        if isinstance(part, float) and not math.isfinite(part):
            return False
        level += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _within(keyword: str, value: float, kind: Any) -> bool:
    """Whether the library can count up to a bound. It reduces upper bounds of integers to its own limit."""
    if kind == "integer" and "aximum" in keyword:
        return value > -_MOST
    return -_MOST < value < _MOST
