"""Checks whether a JSON Schema has finite texts: one that requires itself through ``{"$ref": "#"}`` has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from llmjax.constraints.closing import CHOICES, JOINED, NAMED, ONE, SEVERAL
from llmjax.errors import InvalidRequest

_CONTRADICTIONS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
}


def target(root: Any, reference: str) -> Any:
    """The target of a reference within a schema; None: there is none."""
    found = root
    for step in unquote(reference).removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(step)
        elif isinstance(found, list) and step.isdigit() and len(step) < 8:
            found = found[int(step)] if int(step) < len(found) else None
        else:
            return None
    return found if reference in ("#", "") or "/" in reference else None


def with_finite_values(schema: Any) -> Any:
    """The schema with ``false`` in place of parts that no finite text fits.

    Args:
        schema: a well-formed JSON Schema.

    Raises:
        InvalidRequest: no finite text fits the whole schema.
    """
    finite = _Finite(schema)
    if finite.ends(schema):
        return finite.without_others(schema)
    raise InvalidRequest("no finite text is valid: what is required never ends, or its schema is false")


class _Finite:
    """The parts of a schema that have a finite value: the least fixed point of the rules."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found: set[int] = set()
        parts = self._parts()
        needed_by: dict[int, list[Any]] = {}
        for part in parts:
            for other in self._needs(part):
                needed_by.setdefault(id(other), []).append(part)
        waiting = parts
        while waiting:
            part = waiting.pop()
            if id(part) not in self._found and self._rule(part):
                self._found.add(id(part))
                waiting += needed_by.get(id(part), ())

    def ends(self, part: Any) -> bool:
        """Whether a part has a finite value."""
        return id(part) in self._found if isinstance(part, dict) else part is not False

    def without_others(self, schema: Any) -> Any:
        """A part with a finite value, with ``false`` in place of inner parts that have none."""
        if not isinstance(schema, dict):
            return schema
        return {keyword: self._inside(keyword, value) for keyword, value in schema.items()}

    def _inside(self, keyword: str, value: Any) -> Any:
        if keyword in NAMED and isinstance(value, dict):
            return {name: self._or_false(part) for name, part in value.items()}
        if keyword in SEVERAL | CHOICES | {"allOf"} and isinstance(value, list):
            return [self._or_false(part) for part in value]
        return self._or_false(value) if keyword in ONE else value

    def _or_false(self, part: Any) -> Any:
        return self.without_others(part) if self.ends(part) else False

    def _parts(self) -> list[dict[str, Any]]:
        """The schema, and all schemas inside it and at the targets of its references, each once."""
        found: dict[int, dict[str, Any]] = {}
        level = [self._root]
        while level:
            part = level.pop()
            if isinstance(part, dict) and id(part) not in found:
                found[id(part)] = part
                level += self._needs(part)
        return list(found.values())

    def _needs(self, part: dict[str, Any]) -> Iterator[Any]:
        yield from _inner(part)
        if isinstance(reference := part.get("$ref"), str):
            yield target(self._root, reference)

    def _rule(self, schema: dict[str, Any]) -> bool:
        """Whether a schema has a finite value, as far as is known yet."""
        if isinstance(reference := schema.get("$ref"), str) and not self.ends(target(self._root, reference)):
            return False
        if "const" in schema:
            return True
        if "enum" in schema:
            return bool(schema["enum"])
        if any(not any(map(self.ends, schema[name])) for name in CHOICES if name in schema):
            return False
        if not all(map(self.ends, schema.get("allOf", ()))):
            return False
        kinds = schema.get("type", "any")
        return any(self._of_kind(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds))

    def _of_kind(self, kind: str, schema: dict[str, Any]) -> bool:
        least, most = (schema.get(name) for name in _CONTRADICTIONS.get(kind, ("", "")))
        if isinstance(least, int | float) and isinstance(most, int | float) and least > most:
            return False
        match kind:
            case "array":
                return self._array(schema, least or 0)
            case "object":
                return all(self.ends(_property(schema, name)) for name in schema.get("required", ()))
            case _:
                return True

    def _array(self, schema: dict[str, Any], least: int) -> bool:
        items = schema.get("items", True)
        first, others = schema.get("prefixItems", []), items
        if isinstance(items, list):
            first, others = items, schema.get("additionalItems", True)
        return all(map(self.ends, first[:least])) and (least <= len(first) or self.ends(others))


def _property(schema: dict[str, Any], name: str) -> Any:
    """The schema of a property."""
    named = schema.get("properties", {})
    if name in named:
        return named[name]
    joined = schema.keys() & (JOINED | {"patternProperties"})
    return True if joined else schema.get("additionalProperties", True)


def _inner(schema: dict[str, Any]) -> Iterable[Any]:
    """The schemas directly inside a schema."""
    for keyword, value in schema.items():
        if keyword in NAMED and isinstance(value, dict):
            yield from value.values()
        elif keyword in SEVERAL | CHOICES | {"allOf"} and isinstance(value, list):
            yield from value
        elif keyword in ONE:
            yield value
