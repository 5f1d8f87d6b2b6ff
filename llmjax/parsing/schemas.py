"""What the tools of a request say of their parameters, as far as reading arguments needs it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.characters import whole_characters
from llmjax.parsing.python_literal import literal

MAX_REFERENCES = 16  # followed for one parameter, so that a circle ends
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class ToolSchemas:
    """Names and parameters of a request's tools.

    Args:
        tools: functions in OpenAI's form, checked.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._parameters)

    def schema(self, tool: str) -> Any:
        """The schema of all the parameters together, as an object."""
        return self._parameters.get(tool)

    def parameters(self, tool: str) -> list[str]:
        """Names of the parameters, in order."""
        return list(self._properties(tool))

    def types(self, tool: str, parameter: str) -> frozenset[str] | None:
        """JSON types that a parameter may have; None: any."""
        schema = self._properties(tool).get(parameter)
        root = self._parameters.get(tool, {})
        return json_types(schema, root)

    def _properties(self, tool: str) -> Mapping[str, Any]:
        schema = self._parameters.get(tool, {})
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return properties if isinstance(properties, Mapping) else {}


def json_of_text(text: str, types: frozenset[str] | None) -> str:
    """A parameter that was written as plain text, as JSON of a type that it may have.

    Args:
        types: see ``ToolSchemas.types``.
    """
    if types == frozenset({"string"}):
        return json.dumps(text, ensure_ascii=False)
    for read in (_json, literal):
        try:
            value = read(text.strip())
            if types is None or (_fits(value, types) and not isinstance(value, str)):  # a text has no quotes
                return whole_characters(json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (ValueError, RecursionError):
            continue
    if types is not None and "boolean" in types and text.strip().lower() in ("true", "false"):
        return text.strip().lower()
    return json.dumps(text, ensure_ascii=False)


def _json(text: str) -> Any:
    return json.loads(text)


def _fits(value: Any, types: frozenset[str]) -> bool:
    if value is None:
        return "null" in types
    kind = _JSON_TYPES[type(value)]
    return kind in types or (kind == "integer" and "number" in types)


def json_types(schema: Any, root: Any) -> frozenset[str] | None:
    """JSON types that a schema allows; None: any.

    Args:
        root: what its references are about.
    """
    return _types(schema, root, references=MAX_REFERENCES)


def without_references(schema: Any, root: Any, *, references: int) -> Any:
    """A schema, or the one that it refers to; None: it is more than ``references`` away."""
    while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        if references == 0:
            return None
        schema, references = _referred(reference, root), references - 1
    return schema


def _types(schema: Any, root: Any, *, references: int) -> frozenset[str] | None:
    schema = without_references(schema, root, references=references)
    if not isinstance(schema, Mapping) or references == 0:
        return None
    types = schema.get("type")
    if isinstance(types, str):
        return frozenset({types})
    if isinstance(types, list):
        return frozenset(kind for kind in types if isinstance(kind, str))
    if isinstance(values := schema.get("enum"), list):
        return frozenset("null" if value is None else _JSON_TYPES[type(value)] for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), list):
            kinds = [_types(choice, root, references=references - 1) for choice in choices[:MAX_REFERENCES]]
            return None if None in kinds else frozenset().union(*(kind for kind in kinds if kind is not None))
    return None


def _referred(reference: str, root: Any) -> Any:
    if not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root
