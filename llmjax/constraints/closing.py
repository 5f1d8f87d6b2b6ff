"""Closes JSON Schemas, so that objects have only the properties that are named."""

from __future__ import annotations

from typing import Any

# Keywords whose values are a schema, a list of schemas, or schemas by name. Schemas that are combined with others
# (``allOf``, ``if`` …) stay open: if closed, they would forbid the properties of the others.
ONE = frozenset({"items", "additionalItems", "additionalProperties", "contains", "propertyNames"})
SEVERAL = frozenset({"prefixItems", "items"})
CHOICES = frozenset({"anyOf", "oneOf"})
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
JOINED = frozenset({"allOf", "anyOf", "oneOf", "if", "then", "else", "$ref", "$dynamicRef", "unevaluatedProperties"})


def closed(schema: Any) -> Any:
    """The schema with ``additionalProperties: false`` wherever it names properties and says nothing of others."""
    if not isinstance(schema, dict):
        return schema
    named = "properties" in schema or "patternProperties" in schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            found[key] = {name: closed(part) for name, part in value.items()}
        elif isinstance(value, list) and (key in SEVERAL or (key in CHOICES and not named)):
            found[key] = [closed(part) for part in value]
        else:
            found[key] = closed(value) if key in ONE else value
    if named and "additionalProperties" not in schema and not schema.keys() & JOINED:
        found["additionalProperties"] = False
    return found
