"""What of a schema an answer is held to: every odd one here is one that the library refuses as a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from llmjax.constraints.calls import Tool
from llmjax.constraints.finite import target
from llmjax.constraints.schemas import enforceable
from llmjax.errors import InvalidRequest

PLAIN = {"type": "string"}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "required": ["v"],
            "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
        }
    },
}
# Of a property "x": what is odd, and the keyword at fault.
ODD: list[tuple[Any, str]] = [
    ({"type": "string", "pattern": "^(?!x).*$"}, "pattern"),
    ({"type": "string", "pattern": r"\bfoo\b"}, "pattern"),
    ({"type": "string", "pattern": r"^(a)\1$"}, "pattern"),
    ({"type": "string", "pattern": "["}, "pattern"),
    ({"type": "string", "pattern": 3}, "pattern"),
    ({"type": "string", "pattern": "x{20000}"}, "pattern"),
    ({"type": "string", "minLength": 20000}, "minLength"),
    ({"type": "string", "minLength": -1}, "minLength"),
    ({"type": "string", "format": 3}, "format"),
    ({"$ref": "#/$defs/nothing"}, "$ref"),
    ({"$ref": "https://example.com/schema.json"}, "$ref"),
    ({"$ref": "#nothing"}, "$ref"),
    ({"$ref": 3}, "$ref"),
    ({"type": "object", "required": None}, "required"),
    ({"type": "object", "required": "x"}, "required"),
    ({"type": "object", "required": [1]}, "required"),
    ({"type": "object", "properties": []}, "properties"),
    ({"type": "object", "patternProperties": {"(?=x)": PLAIN}}, "patternProperties"),
    ({"type": "object", "additionalProperties": 3}, "additionalProperties"),
    ({"type": "any"}, "type"),
    ({"type": ["string", "file"]}, "type"),
    ({"type": None}, "type"),
    ({"enum": "x"}, "enum"),
    ({"anyOf": {}}, "anyOf"),
    ({"type": "array", "items": 3}, "items"),
    ({"type": "integer", "minimum": -(2**63), "maximum": 9007199254740993}, "minimum"),
    ({"type": "integer", "minimum": "0"}, "minimum"),
    ({"type": "number", "maximum": 1.797e308}, "maximum"),
    ({"type": "number", "maximum": float("inf")}, "maximum"),
    ({"type": "integer", "multipleOf": 0}, "multipleOf"),
    ({"const": float("inf")}, "const"),
]
# Of the same: what is left out unless all of it is to be kept to.
LEFT_OUT: list[tuple[Any, str]] = [
    ({"not": PLAIN}, "not"),
    ({"if": PLAIN, "then": PLAIN}, "if"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "string", "format": "strange"}, "format"),
]


def of(x: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": x, "y": {"type": "integer"}}, "required": ["y"]}


def refused(schema: Any, *, lenient: bool) -> str:
    options = {"lenient": lenient, "coerce_one_of": lenient}
    error: str = LLMatcher.validate_grammar(
        json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})
    )
    return error


@pytest.mark.parametrize(("x", "keyword"), ODD, ids=str)
def test_what_is_odd_is_left_out_or_named(x: Any, keyword: str) -> None:
    found = enforceable(of(x), lenient=True, repair=True)
    assert not refused(found, lenient=True)
    assert keyword not in found["properties"]["x"] or x.get("items") == 3 or keyword == "additionalProperties"
    assert found["properties"]["y"] == {"type": "integer"} and found["required"] == ["y"]
    for lenient in (True, False):
        with pytest.raises(InvalidRequest, match=rf"^properties\.x\.{keyword.replace('$', '[$]')}: "):
            enforceable(of(x), lenient=lenient)


@pytest.mark.parametrize(("x", "keyword"), LEFT_OUT, ids=str)
def test_what_cannot_be_enforced_is_named(x: Any, keyword: str) -> None:
    assert not refused(enforceable(of(x), lenient=True), lenient=True)
    with pytest.raises(InvalidRequest, match=rf"^properties\.x\.{keyword}: "):
        enforceable(of(x), lenient=False)


@pytest.mark.parametrize(
    "schema",
    [
        of(PLAIN),
        TREE,
        of({"anyOf": [PLAIN, {"type": "null"}]}),
        of({"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 5}),
        of({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}),
        of({"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 1}),
        {"type": "object", "patternProperties": {"^a": PLAIN}, "additionalProperties": False},
        {"$defs": {"a/b": PLAIN}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a~1b"}}},
        {"type": "object", "properties": {"x": {"$ref": "#/components/X"}}, "components": {"X": PLAIN}},
        True,
    ],
    ids=str,
)
def test_ordinary_schemas_stay(schema: Any) -> None:
    for lenient in (True, False):
        assert enforceable(schema, lenient=lenient, repair=lenient) == schema


def test_notes_go() -> None:
    noted = {**of({**PLAIN, "title": "X", "default": float("inf")}), "$schema": "http://example.com/nothing#"}
    assert enforceable(noted, lenient=False) == of(PLAIN)


ENDLESS: list[Any] = [
    {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
    {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}, False]},
    {"allOf": [PLAIN, {"$ref": "#"}]},
    {"type": "object", "required": ["a"], "properties": {"a": {"enum": []}}},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}}},
    {"type": "array", "minItems": 2, "prefixItems": [PLAIN, {"$ref": "#"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
]


@pytest.mark.parametrize("schema", ENDLESS, ids=str)
@pytest.mark.parametrize("lenient", [True, False])
def test_no_finite_text_is_an_error(schema: Any, lenient: bool) -> None:
    with pytest.raises(InvalidRequest, match="no finite text"):
        enforceable(schema, lenient=lenient, repair=lenient)


@pytest.mark.parametrize("endless", ENDLESS[:2], ids=str)
def test_what_need_not_be_written_never_is(endless: Any) -> None:
    moved = json.loads(json.dumps(endless).replace('"#"', '"#/$defs/e"'))
    schema = {**of({"$ref": "#/$defs/e"}), "$defs": {"e": moved}}
    assert enforceable(schema, lenient=False)["properties"] == {"x": False, "y": {"type": "integer"}}
    either = {**of({"anyOf": [PLAIN, {"$ref": "#/$defs/e"}]}), "$defs": {"e": moved}}
    assert enforceable(either, lenient=False)["properties"]["x"] == {"anyOf": [PLAIN, False]}
    # A list of them may be empty.
    several = {**of({"type": "array", "items": {"$ref": "#/$defs/e"}}), "$defs": {"e": moved}}
    assert enforceable(several, lenient=False)["properties"]["x"] == {"type": "array", "items": False}


def test_long_chains_of_references_take_no_longer() -> None:
    defs: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2000)}
    assert enforceable({"$ref": "#/$defs/0", "$defs": {**defs, "2000": PLAIN}}, lenient=False)
    with pytest.raises(InvalidRequest, match="no finite text"):
        enforceable({"$ref": "#/$defs/0", "$defs": {**defs, "2000": {"$ref": "#"}}}, lenient=False)


def test_where_references_lead() -> None:
    root = {"a": [{"x/y": 1}, 2], "~": {"%": 3}}
    assert target(root, "#") is root and target(root, "#/a/0/x~1y") == 1 and target(root, "#/~0/%25") == 3
    assert target(root, "#/a/2") is None and target(root, "#a") is None and target(root, "#/a/0/x~1y/z") is None


def tool(parameters: Any, **more: Any) -> Tool:
    return Tool.of({"type": "function", "function": {"name": "odd", "parameters": parameters, **more}}, path="tools.3")


def test_a_tools_arguments_are_an_object() -> None:
    anything = {"type": "json_schema", "json_schema": {"type": "object"}}
    for parameters in ({"type": "string"}, {"type": 3}, ENDLESS[0]):
        assert tool(parameters).arguments == anything
    assert tool({"properties": {"x": PLAIN}}).arguments["json_schema"]["type"] == "object"
    assert tool({"type": ["object", "null"]}).arguments["json_schema"]["type"] == "object"
    assert tool(None).arguments["json_schema"] == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(("x", "keyword"), ODD[:3], ids=str)
def test_a_strict_tools_fault_is_named(x: Any, keyword: str) -> None:
    assert tool(of(x)).arguments["json_schema"]["required"] == ["y"]
    with pytest.raises(InvalidRequest) as caught:
        tool(of(x), strict=True)
    assert caught.value.field == "tools.3.function.parameters"
    assert all(word in str(caught.value) for word in ("'odd'", f"properties.x.{keyword}", "tools.3"))
    with pytest.raises(InvalidRequest, match="'odd': type"):
        tool({"type": "string"}, strict=True)
