"""JSON schemas of growing difficulty, as requests bring them."""

from __future__ import annotations

import json
import random
from typing import Any


def record(*required: str, **properties: Any) -> dict[str, Any]:
    """A closed object."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT = {"type": "string", "maxLength": 6}
INTEGER = {"type": "integer", "minimum": -99, "maximum": 99}
YES = {"type": "boolean"}
TREE = {
    "$defs": {"node": record("value", value=YES, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})},
    "$ref": "#/$defs/node",
}

SCHEMAS: list[dict[str, Any]] = [
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "integer", "minimum": -1000, "maximum": 1000},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100},
    {"type": "integer", "minimum": 0, "maximum": 300, "multipleOf": 7},
    {"type": "number", "minimum": -1, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
    {"const": "exactly"},
    {"const": 3},
    {"const": {"a": [1, None]}},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, "1", None, True]},
    {"enum": ["é", '"', "\\", "a\nb"]},
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "pattern": "^(\\d{3}-)?\\d{4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "array", "items": YES, "maxItems": 4},
    {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [YES, INTEGER], "items": False, "minItems": 2},
    {"type": "array", "items": {"type": "array", "items": YES, "maxItems": 2}, "maxItems": 2},
    record("a", a=YES),
    record(a=YES, b=YES),
    record("a", "b", a=INTEGER, b=TEXT),
    record("a", a=INTEGER, b=TEXT, c=YES),
    record("b", a=INTEGER, b=TEXT),
    record("c", "a", a=YES, b=YES, c=YES, d=YES),
    record("inner", inner=record("x", x=INTEGER)),
    record("list", list={"type": "array", "items": record("k", k=YES), "maxItems": 2}),
    record("value", value={"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
    record("value", value={"anyOf": [INTEGER, TEXT]}),
    record("value", value={"oneOf": [YES, {"type": "null"}]}),
    record(
        "name", "age", name={"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"}, age={"type": "integer", "minimum": 0}
    ),
    {"type": "object", "additionalProperties": YES, "maxProperties": 2},
    {
        "type": "object",
        "properties": {"a": YES},
        "additionalProperties": INTEGER,
        "required": ["a"],
        "maxProperties": 3,
    },
    {"anyOf": [record("a", a=YES), record("b", b=INTEGER)]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]},
    {"allOf": [record("a", a=YES)]},
    {"$defs": {"n": INTEGER}, **record("x", "y", x={"$ref": "#/$defs/n"}, y={"$ref": "#/$defs/n"})},
    {"definitions": {"t": TEXT}, "type": "array", "items": {"$ref": "#/definitions/t"}, "maxItems": 2},
    TREE,
    {"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}, "maxItems": 1}}, "$ref": "#/$defs/l"},
    record("tags", tags={"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "maxItems": 3}),
    record("at", at={"type": "string", "format": "date-time"}),
    record("email", email={"type": "string", "format": "email", "maxLength": 20}),
    record("kind", "size", kind={"enum": ["a", "b"]}, size={"type": "number", "minimum": 0, "maximum": 10}),
    record('q"uote', **{'q"uote': YES}),
    record("u v", **{"u v": YES}),
    record("a/b c", **{"a/b c": YES}),
    {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": {"anyOf": [record("t", "v", t={"const": 1}, v=YES), record("t", t={"const": 2})]},
    },
    record(
        "m",
        m={"type": "array", "items": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 2}, "maxItems": 2},
    ),
    {"title": "A title", "description": "Words", "default": 1, **INTEGER},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/x", **record("a", a=YES)},
    record(*[f"k{i}" for i in range(12)], **{f"k{i}": YES for i in range(12)}),
    record("a", a=record("b", b=record("c", c=record("d", d=record("e", e=YES))))),
]


def grown(count: int) -> list[dict[str, Any]]:
    """``count`` schemas: those above, then objects, arrays and alternatives made of earlier ones, ever deeper."""
    found, chance = list(SCHEMAS), random.Random(0)
    # References lead from the root, and these schemas have another one when they are parts.
    parts = [schema for schema in SCHEMAS if not any(f'"{key}"' in json.dumps(schema) for key in ("$ref", "$schema"))]
    while len(found) < count:
        one, two, three = (chance.choice(parts) for _ in range(3))
        kind = len(found) % 4
        if kind == 0:
            new = record("first", "third", first=one, second=two, third=three)
        elif kind == 1:
            new = {"type": "array", "prefixItems": [one, two], "items": three, "minItems": 1, "maxItems": 3}
        elif kind == 2:
            new = {
                "anyOf": [record("kind", "value", kind={"const": i}, value=part) for i, part in enumerate((one, two))]
            }
        else:
            new = record("items", items={"type": "array", "items": record("x", x=one, y=two), "maxItems": 2})
        found.append(new)
        parts.append(new)
    return found
