"""Parameters that were written as text, as JSON of a type that they may have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmjax.parsing.schemas import ToolSchemas, json_of_text

OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, '"exact words"', '"exact words"'),
        (OPTIONAL, '"exact words"', '"exact words"'),
        (OPTIONAL, "'x'", "'x'"),
        (OPTIONAL, "12", "12"),
        (OPTIONAL, "null", None),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "array"]}, "['a']", ["a"]),
        ({}, '"x"', "x"),  # of any type: what it looks like
    ],
)
def test_values_of_parameters(schema: dict[str, Any], text: str, value: Any) -> None:
    tool = {"function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}}
    assert json.loads(json_of_text(text, ToolSchemas([tool]).types("f", "a"))) == value
