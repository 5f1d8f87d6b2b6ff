"""The input of a custom tool comes out of its call's arguments, wherever the stream is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.serve.custom_tools import InputForm, InputReader, arguments_of, as_function, chosen, from_chat, input_form
from llmjax.serve.errors import ApiError


def read(text: str, cuts: list[int]) -> str:
    reader = InputReader()
    places = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    return "".join(reader.read(text[a:b]) for a, b in itertools.pairwise(places)) + reader.finish()


CUTS = st.lists(st.integers(0, 60), max_size=6)


@given(st.text(max_size=20), st.booleans(), st.sampled_from([None, 2]), CUTS)
def test_what_is_written_is_read(text: str, ascii: bool, indent: int | None, cuts: list[int]) -> None:
    assert read(json.dumps({"input": text}, ensure_ascii=ascii, indent=indent), cuts) == text
    assert read(arguments_of(text), cuts) == text
    assert read(json.dumps({"input": text, "more": [1, "x"]}), cuts) == text


@given(st.text(alphabet='{}":\\inputu0dD8 x', max_size=30), CUTS)
def test_cuts_change_nothing(text: str, cuts: list[int]) -> None:
    assert read(text, cuts) == read(text, [])


@pytest.mark.parametrize(
    "text", ["", "ls -l", '"ls"', '{"command": "ls"}', '{"input": {"a": 1}}', '{"input', '{"input": 3}', " {", "[]"]
)
def test_other_arguments_are_the_input(text: str) -> None:
    assert read(text, []) == text == read(text, list(range(len(text))))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"input": "a', "a"),  # cut by its length
        ('{"input": "a\\', "a"),
        ('{"input": "\\ud83d\\ude00!"}', "😀!"),
        ('{"input": "\\ud83d!"}', "\ufffd!"),  # half of a pair
        ('{"input": "\\ud83d\\u0041"}', "\ufffdA"),
        ('{"input": "\\ude00"}', "\ufffd"),
        ('{"input": "\\u12xy"}', "u12xy"),
        ('{"input": "a\nb"}', "a\nb"),  # which JSON does not allow, and models write
    ],
)
def test_what_is_not_quite_json(text: str, found: str) -> None:
    assert read(text, []) == found == read(text, list(range(len(text))))


def test_a_tool_as_a_function() -> None:
    regex = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+|x"}
    (tool,) = [as_function({"type": "custom", "name": "calc", "description": "Adds", "format": regex}, "tools.0")]
    function = tool["function"]
    assert function["name"] == "calc" and function["description"] == "Adds" and function["strict"] is True
    assert function["parameters"]["properties"] == {"input": {"type": "string", "pattern": "^(?:[0-9]+|x)$"}}
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    told = {"type": "custom", "name": "a", "format": lark}
    assert "start: /a+/" in as_function(told, "tools.0")["function"]["description"]
    assert input_form(told, "tools.0") == InputForm(path="tools.0.format", lark="start: /a+/")
    assert input_form({"format": regex}, "tools.1") == InputForm(path="tools.1.format", lark=None)
    assert input_form({"type": "custom", "name": "a"}, "tools.0") is None
    assert (
        "description" not in as_function({"type": "custom", "name": "a", "format": {"type": "text"}}, "x")["function"]
    )
    for form in ("text", {"type": "grammar"}, {"type": "grammar", "syntax": "gbnf", "definition": "x"}, 3):
        with pytest.raises(ApiError) as caught:
            as_function({"type": "custom", "name": "a", "format": form}, "tools.3")
        assert caught.value.param == "tools.3.format"
    with pytest.raises(ApiError, match="65536 characters"):
        as_function({"name": "a", "format": {**lark, "definition": "start: " + "a " * 2**15}}, "tools.3")


def test_tools_of_a_chat() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}
    plain = {"type": "function", "function": {"name": "f"}}
    tools = [
        plain,
        {"type": "custom", "custom": {"name": "c"}},
        {"type": "custom", "custom": {"name": "g", "format": grammar}},
    ]
    functions, custom = from_chat(tools)
    assert [tool["function"]["name"] for tool in functions] == ["f", "c", "g"] and functions[0] == plain
    assert custom == {"c": None, "g": InputForm(path="tools.2.custom.format", lark='start: "x"')}
    named = {"type": "function", "function": {"name": "c"}}
    assert chosen(functions, {"type": "custom", "custom": {"name": "c"}}) == (functions, named)
    assert chosen(functions, "auto") == (functions, "auto") and chosen(functions, None) == (functions, None)
    some = {"mode": "required", "tools": [plain, {"type": "custom", "custom": {"name": "g"}}, 1, {}]}
    assert chosen(functions, {"type": "allowed_tools", "allowed_tools": some}) == (
        [functions[0], functions[2]],
        "required",
    )
    for custom_tool in (None, 1, {}, {"name": 1}):
        with pytest.raises(ApiError) as caught:
            from_chat([plain, {"type": "custom", "custom": custom_tool}])
        assert caught.value.param == "tools.1.custom"
