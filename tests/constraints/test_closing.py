"""Objects have the properties that their schema names, wherever that forbids nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from llmjax.constraints.closing import closed

INNER = {"type": "object", "properties": {"a": {}}}
SHUT = {**INNER, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (INNER, SHUT),
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({**INNER, "additionalProperties": True}, {**INNER, "additionalProperties": True}),
        ({"items": INNER}, {"items": SHUT}),
        ({"additionalProperties": INNER}, {"additionalProperties": SHUT}),
        ({"anyOf": [INNER, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$defs": {"x": INNER}, "$ref": "#/$defs/x"}, {"$defs": {"x": SHUT}, "$ref": "#/$defs/x"}),
        ({"allOf": [INNER, INNER]}, {"allOf": [INNER, INNER]}),
        ({**INNER, "anyOf": [INNER]}, {**INNER, "anyOf": [INNER]}),
        # Names of properties, and values, are not schemas.
        (
            {"properties": {"properties": {"type": "string"}}},
            {"properties": {"properties": {"type": "string"}}, "additionalProperties": False},
        ),
        ({"const": INNER}, {"const": INNER}),
        ({"enum": [INNER]}, {"enum": [INNER]}),
        (True, True),
        # What must have properties that are not named stays open.
        ({**INNER, "required": ["a", "b"]}, {**INNER, "required": ["a", "b"]}),
        ({**INNER, "minProperties": 2}, {**INNER, "minProperties": 2}),
        ({**INNER, "required": ["a"]}, {**SHUT, "required": ["a"]}),
        ({"anyOf": [INNER], "oneOf": [INNER]}, {"anyOf": [INNER], "oneOf": [INNER]}),
    ],
)
def test_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "combining",
    [
        {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]},
        {"$ref": "#/$defs/x", "properties": {"b": {}}},
        {"properties": {"b": {}}, "anyOf": [{"$ref": "#/$defs/x"}]},
        {"if": {"$ref": "#/$defs/x"}, "then": INNER},
        {"items": {"allOf": [INNER, {"properties": {"b": {"$ref": "#/$defs/x"}}}]}},
    ],
)
def test_what_combines_references_stays_open(combining: dict[str, Any]) -> None:
    schema = {**combining, "$defs": {"x": INNER, "y": INNER}}
    assert closed(schema) == schema


def test_one_reference_is_not_combined() -> None:
    schema = {"properties": {"b": {"allOf": [{"$ref": "#/$defs/x"}]}}, "$defs": {"x": INNER}}
    assert closed(schema) == {**schema, "additionalProperties": False, "$defs": {"x": SHUT}}
