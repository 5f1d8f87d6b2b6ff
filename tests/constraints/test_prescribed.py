"""What a form may prescribe: told from its text, before any work."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from llmjax.constraints.grammars import grammar_of
from llmjax.constraints.prescribed import MOST_PRESCRIBED, check_expression, check_lark
from llmjax.errors import InvalidRequest
from llmjax.sampling.structured import MAX_GRAMMAR_CHARS, StructuredOutputsParams

LONG = "x" * (MOST_PRESCRIBED + 1)


def grammar(**form: Any) -> str:
    return grammar_of(StructuredOutputsParams(**form, field="response_format"), special=lambda text: [text])


@pytest.mark.parametrize(
    "expression",
    [
        "x{100000000}",
        "x{100000000,}",
        "x{100000000}?",
        "(x{1000}){1000}",
        "(?P<name>(?:x{20}){20}){50}",
        r"(\{[{}]){10000}",
        "(a|bcd){6000}",
        "a|x{16385}",
        LONG,
        "x{" + "9" * 5000 + "}",
    ],
)
def test_expressions_that_prescribe_too_much(expression: str) -> None:
    for form in ({"regex": expression}, {"json": {"items": [{"type": "string", "pattern": expression}]}}):
        with pytest.raises(InvalidRequest, match=r"^response_format: .*more than 16384") as raised:
            grammar(**form)
        assert raised.value.field == "response_format"


@pytest.mark.parametrize(
    "expression",
    [
        "x{16384}",
        "x{0,100000000}",
        "(a|bc){6000}",
        r"\{100000000}[{100000000}]",
        "(x{1000})*",
        "(x{1000})?(y{0}){1000}",
        "|".join(["choice"] * 5000),
    ],
)
def test_expressions_that_prescribe_little(expression: str) -> None:
    assert grammar(regex=expression)


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "string", "minLength": 10**8}},
        {"json": {"type": "object", "properties": {"a": {"anyOf": [{"type": "array", "minItems": 1e8}]}}}},
        {"json": {"type": "object", "minProperties": 10**8}},
        {"json": {"type": "object", "patternProperties": {"x{100000}": {}}}},
        {"json": {"const": LONG}},
        {"json": {"enum": ["a", LONG]}},
        {"choice": ["a", LONG]},
        {"grammar": 'start: "x"{100000000}'},
        {"grammar": 'start: a ~ 100000000\na: "x"'},
        {"grammar": "start: /(x{1000}){1000}/"},
        {"grammar": f'root ::= "{LONG}"'},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "regex", "pattern": "x{100000000}"}}},
    ],
)
def test_forms_that_prescribe_too_much(form: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^response_format: .*16384"):
        grammar(**form)


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "string", "maxLength": 10**8, "default": {"minLength": 10**8}}},
        {"json": {"type": "array", "maxItems": 10**8, "items": {"type": "integer"}}},
        {"json": {"type": "object", "properties": {"minLength": {"type": "integer", "minimum": 10**8}}}},
        {"grammar": '// "x"{100000000}\nstart: "{100000000}" | a{0,100000000}\na: /[\\/{100000000}]/'},
        {"grammar": 'root ::= [{100000000}] "a" # {100000000}'},
    ],
)
def test_what_is_no_count_or_only_a_highest_one(form: dict[str, Any]) -> None:
    assert grammar(**form)


@pytest.mark.parametrize("piece", ["[", "(?<", "{1", "()", r"\p{", "(", "x?", "a{", '"', "/"])
def test_nothing_is_read_twice(piece: str) -> None:
    """In quadratic time it would take hours, and pytest would end it."""
    text = (piece * MAX_GRAMMAR_CHARS)[:MAX_GRAMMAR_CHARS]
    for check in (check_expression, check_lark):
        with suppress(InvalidRequest):
            check(text)
