"""Closes JSON Schemas, so that objects have only the properties that are named."""

from __future__ import annotations

from typing import Any

# Keywords whose values are a schema, a list of schemas, or schemas by name. Schemas that are combined with others
# (``allOf``, ``if`` …) stay open: if closed, they would forbid the properties of the others.
ONE = frozenset({"items", "additionalItems", "additionalProperties", "contains", "propertyNames"})
SEVERAL = frozenset({"prefixItems", "items"})
CHOICES = frozenset({"anyOf", "oneOf"})
DEFINITIONS = frozenset({"$defs", "definitions"})
NAMED = frozenset({"properties", "patternProperties"}) | DEFINITIONS
PARTS = frozenset({"allOf", "anyOf", "oneOf", "if", "then", "else"})
JOINED = PARTS | {"$ref", "$dynamicRef", "unevaluatedProperties"}


def closed(schema: Any) -> Any:
    """The schema with ``additionalProperties: false`` wherever it names properties and says nothing of others.

    It stays as it is where a part that is combined with others refers to a schema, which may be closed elsewhere.
    """
    return schema if _combines_references(schema, combined=False) else _closed(schema)


def _combines_references(schema: Any, *, combined: bool) -> bool:
    """Whether a schema that others are combined with has a reference.

    Args:
        combined: whether the schema is part of one with others.
    """
    if not isinstance(schema, dict):
        return False
    named = "properties" in schema or "patternProperties" in schema
    joined, together = schema.keys() & JOINED, schema.get("allOf")
    combined = combined or (named and bool(joined)) or len(joined) > 1
    combined = combined or (isinstance(together, list) and len(together) > 1)
    if combined and ("$ref" in schema or "$dynamicRef" in schema):
        return True
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            own = combined and key not in DEFINITIONS
            parts = [(part, own) for part in value.values()]
        elif key in ONE or key in SEVERAL or key in PARTS:
            parts = [(part, combined) for part in (value if isinstance(value, list) else [value])]
        else:
            continue
        if any(_combines_references(part, combined=own) for part, own in parts):
            return True
    return False


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    named = "properties" in schema or "patternProperties" in schema
    combined = named or len(schema.keys() & JOINED) > 1
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            found[key] = {name: _closed(part) for name, part in value.items()}
        elif isinstance(value, list) and (key in SEVERAL or (key in CHOICES and not combined)):
            found[key] = [_closed(part) for part in value]
        else:
            found[key] = _closed(value) if key in ONE else value
    if named and not schema.keys() & (JOINED | {"additionalProperties"}) and not _demands_others(schema):
        found["additionalProperties"] = False
    return found


def _demands_others(schema: dict[str, Any]) -> bool:
    """Whether an object may have to have properties that its schema does not name."""
    names, required = schema.get("properties"), schema.get("required")
    others = set(map(str, required if isinstance(required, list) else ())) - set(
        names if isinstance(names, dict) else ()
    )
    return "minProperties" in schema or bool(others)
