"""Converts forms of output to grammars of ``llguidance``: JSON objects that hold JSON schemas and Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from llmjax.constraints.closing import closed
from llmjax.constraints.lark import Markers, lark_of, lark_regex
from llmjax.constraints.prescribed import check_choices, check_expression, check_lark, check_schema
from llmjax.constraints.schemas import enforceable
from llmjax.constraints.tags import tag_grammar
from llmjax.errors import InvalidRequest
from llmjax.sampling.structured import FreeText, StructuredOutputsParams

# JSON may span lines, but white space is limited, because uncertain models would go on writing it.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"


def grammar_of(params: StructuredOutputsParams, *, special: Callable[[str], list[int | str]]) -> str:
    """The grammar of a form of output.

    Args:
        special: splits a marker at special tokens, see ``Markers``.

    Raises:
        InvalidRequest: the form is not valid.
    """
    markers = Markers(special)
    forms = [params] if params.instead is None else [params, params.instead]
    grammars = [_form(form, markers) for form in forms]
    if len(forms) > 1 or params.after is not None:
        for i, grammar in enumerate(grammars):
            grammar["name"] = f"form_{i}"
        grammars.insert(0, {"lark_grammar": _choice([form.after for form in forms], markers)})
    return json.dumps({"grammars": grammars})


def json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """The options of ``llguidance`` for writing JSON."""
    options: dict[str, Any] = {"lenient": params.lenient, "coerce_one_of": params.lenient}
    if params.disable_any_whitespace:
        return {**options, "whitespace_flexible": False}
    return {**options, "whitespace_pattern": params.whitespace_pattern or WHITESPACE}


def _form(params: StructuredOutputsParams, markers: Markers) -> dict[str, Any]:
    try:
        return _grammar(params, markers)
    except InvalidRequest as error:
        raise InvalidRequest(f"{params.field}: {error}", field=params.field) from error


def _grammar(params: StructuredOutputsParams, markers: Markers) -> dict[str, Any]:
    if params.json_object:
        return {"json_schema": {"type": "object", "x-guidance": json_options(params)}}
    if params.json is not None:
        schema = enforceable(_read("json", params.json), lenient=params.lenient)
        check_schema(schema)
        if params.disable_additional_properties:
            schema = closed(schema)
        return {"json_schema": _with_options(schema, json_options(params))}
    if params.regex is not None:
        check_expression(params.regex)
        return {"lark_grammar": f"start: {lark_regex(params.regex)}"}
    if params.choice is not None:
        check_choices(params.choice)
        return {"lark_grammar": "start: " + " | ".join(map(json.dumps, params.choice))}
    if params.structural_tag is not None:
        tag = _read("structural_tag", params.structural_tag)
        try:
            check_schema(tag)
            close = params.disable_additional_properties
            return {"lark_grammar": tag_grammar(tag, options=json_options(params), markers=markers, close=close)}
        except InvalidRequest as error:
            raise InvalidRequest(f"structural_tag: {error}") from error
    assert params.grammar is not None
    check_lark(params.grammar)
    return {"lark_grammar": lark_of(params.grammar)}


def _with_options(schema: Any, options: dict[str, Any]) -> Any:
    return {**schema, "x-guidance": options} if isinstance(schema, dict) else schema


def _read(kind: str, text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{kind} is not JSON: {error}") from error


def _choice(before: Sequence[FreeText | None], markers: Markers) -> str:
    """A rule for one of the forms ``form_0``, ``form_1`` …, each after its free text."""
    starts: list[str] = []
    # Models write empty lines after their reasoning.
    rules = ["GAP: /[ \\n]{0,4}/", "TEXT: /(?s:.*)/"]
    for number, text in enumerate(dict.fromkeys(before)):
        forms = " | ".join(f"@form_{i}" for i, own in enumerate(before) if own == text)
        rules.append(f"answer_{number}: {forms}")
        if text is None:
            starts.append(f"answer_{number}")
            continue
        free = f"free_{number}"
        rules.append(markers.text_until(free, text.closing))
        opened = f"{markers.literal(text.opening)} " if text.opening else ""
        starts.append(f"{opened}{free} GAP answer_{number}")
        if text.opening:  # else the output begins inside it
            starts.append(f"{markers.literal(text.otherwise)} answer_{number}")
    return "\n".join([f"start: {' | '.join(starts)}", *rules, ""])
