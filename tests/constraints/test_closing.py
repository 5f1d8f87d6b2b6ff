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
    ],
)
def test_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected
