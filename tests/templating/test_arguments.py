"""Arguments of calls in a history, whatever a model has written: they reach the prompt and end no conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.templating.arguments import MAX_DEPTH, read_arguments
from llmjax.templating.rendering import render
from llmjax.templating.wire import RenderRequest

DEEP = "[" * 10**5


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"cmd": "ls"}', {"cmd": "ls"}),
        ("", {}),
        (" \n", {}),
        (None, {}),
        ("null", {}),
        ("[]", {}),
        ({"cmd": "ls"}, {"cmd": "ls"}),
        # One way to read them.
        ('{"a": [1, 2, ], }', {"a": [1, 2]}),
        ("{'cmd': 'echo \"hi\"', 'all': True, 'of': None}", {"cmd": 'echo "hi"', "all": True, "of": None}),
        (r"{'it': 'isn\'t\n'}", {"it": "isn't\n"}),
        ('{"text": "two\nlines\tand more"}', {"text": "two\nlines\tand more"}),
        ('```json\n{"cmd": "ls"}\n```', {"cmd": "ls"}),
        (r'"{\"cmd\": \"ls\"}"', {"cmd": "ls"}),
        # What stands in strings is left alone.
        ('{"x": "it\'s True, }", }', {"x": "it's True, }"}),
        # Halves of characters.
        (r'{"x": "cut \ud83d", "\udc00": 1}', {"x": "cut \ufffd", "\ufffd": 1}),
        ({"x": ["cut \ud83d"]}, {"x": ["cut \ufffd"]}),
        # None that can be read with certainty.
        ('{"cmd": "ls', '{"cmd": "ls'),
        ('{"cmd":"ls" "x":1}', '{"cmd":"ls" "x":1}'),
        ('{"a": 1} and so on', '{"a": 1} and so on'),
        ("[1]", "[1]"),
        ("3", "3"),
        ([1], "[1]"),
        ("cut \ud83d", "cut \ufffd"),
        ('{"a":' + DEEP, '{"a":' + DEEP),
        ('{"a":' + "9" * 5000 + "}", '{"a":' + "9" * 5000 + "}"),
    ],
)
def test_what_is_read(written: Any, read: Any) -> None:
    assert read_arguments(written) == read


def test_numbers_that_json_does_not_have() -> None:
    assert str(read_arguments('{"x": NaN, "y": -Infinity}')) == "{'x': nan, 'y': -inf}"


def test_what_is_deep_stays_text() -> None:
    deep = '{"a": ' * MAX_DEPTH + "1" + "}" * MAX_DEPTH
    assert isinstance(read_arguments(deep), dict)
    assert isinstance(read_arguments(f'{{"a": {deep}}}'), str)


@pytest.mark.parametrize(
    "text", ['"' + '\\"' * 10**5, "'" + "\\'" * 10**5, "{" + ", " * 10**5, "```json " + "`" * 10**5]
)
def test_hostile_texts_take_no_longer(text: str) -> None:
    assert read_arguments(text) == text


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.text("{}[]\"'\\,: \n`aT"))
def test_any_text_is_read_as_something(text: str) -> None:
    found = read_arguments(text)
    assert isinstance(found, dict) or found == text


@given(
    st.dictionaries(st.text(max_size=4), st.recursive(st.integers() | st.booleans() | st.text(), st.lists), max_size=3)
)
def test_objects_are_read_as_they_are(value: dict[str, Any]) -> None:
    assert read_arguments(json.dumps(value)) == value
    assert read_arguments(json.dumps(value, ensure_ascii=False)) == value


HEAD = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
OBJECT = HEAD + "{{ a | tojson }}{% endfor %}{% endfor %}"
EITHER = HEAD + "{{ a if a is string else a | tojson }}{% endfor %}{% endfor %}"
TEXT = HEAD + "{{ a + '' }}{% endfor %}{% endfor %}"
PARAMETERS = HEAD + "{% for k, v in a | items %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "broken", "mended"),
    [
        (OBJECT, r'{"arguments": "{\"cmd\": \"ls"}', '{"cmd": "ls"}'),
        (EITHER, '{"cmd": "ls', '{"cmd": "ls"}'),
        (TEXT, '{"cmd": "ls', '{"cmd": "ls"}'),
        (PARAMETERS, '<arguments>{"cmd": "ls</arguments>', "<cmd>ls</cmd>"),
    ],
)
def test_what_reaches_a_template(template: str, broken: str, mended: str) -> None:
    for arguments, shown in (('{"cmd": "ls', broken), ('{"cmd": "ls",}', mended)):
        call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": arguments}}
        messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        assert render(RenderRequest(source=template, messages=messages), max_chars=1000) == shown
