"""Prompts equal transformers', in whatever form content comes and a template takes it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.errors import ChatTemplateError, InvalidRequest
from llmjax.templating.environment import chat_environment
from llmjax.templating.forms import Forms
from llmjax.templating.rendering import compile_template, render
from llmjax.templating.wire import RenderRequest

USER = [{"role": "user", "content": "Hi"}]
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "templates.json").read_text())
STRINGS = "{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}"
LOOPING = "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}({{ p.text }}){% endfor %}{% endfor %}"
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"


def shown(source: str, messages: Any = USER, *, continued: bool = False, **variables: Any) -> str:
    request = RenderRequest(source=source, messages=messages, variables=variables, continue_final_message=continued)
    return render(RenderRequest.from_bytes(request.to_bytes()), max_chars=10_000)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['name']} {case['prompt']}")
def test_equals_transformers(case: dict[str, Any]) -> None:
    variables = {
        **case["variables"],
        "tools": case["tools"],
        "documents": None,
        "add_generation_prompt": case["prompt"],
    }
    assert shown(case["template"], case["messages"], **variables) == case["text"]


@pytest.mark.parametrize("name", ["mistral", "glm", "kimi", "gemma", "images"])
def test_text_and_one_part_are_the_same(name: str) -> None:
    case = next(case for case in GOLDEN if case["name"] == f"{name} plain")
    messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in case["messages"]]
    variables = {**case["variables"], "tools": None, "add_generation_prompt": case["prompt"]}
    assert shown(case["template"], messages, **variables) == case["text"]


ALL = frozenset({"user", "system", "assistant", "tool"})


@pytest.mark.parametrize(
    ("source", "forms"),
    [
        (STRINGS, Forms()),
        (LOOPING, Forms(only_parts=ALL, parts=ALL, null=False)),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", Forms(null=True)),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", Forms(null=True)),
        # The content of one role alone is looped over, and of the others it must be a string.
        (
            "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
            "{% else %}{{ m.content + '' }}{% endif %}{% endfor %}",
            Forms(only_parts=frozenset({"user"}), parts=frozenset({"user"})),
        ),
        (
            "{% for m in messages %}{% if m.content is not string %}{{ raise_exception('text') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            Forms(),
        ),
        ("{{ raise_exception('never') }}", Forms()),
        (
            "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments + '' }}{% endfor %}"
            "{{ m.content or '' }}{% endfor %}",
            Forms(null=True, text_arguments=True),
        ),
        (
            "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
            "{{ m.content or '' }}{% endfor %}",
            Forms(null=True, text_arguments=True),
        ),
    ],
)
def test_what_a_template_takes(source: str, forms: Forms) -> None:
    assert compile_template(source).forms == forms


def test_parts_are_joined_where_the_template_wants_strings() -> None:
    assert shown(STRINGS, [{"role": "user", "content": PARTS}]) == "u:a\nb;"
    assert shown(LOOPING, [{"role": "user", "content": ["a", PARTS[1]]}]) == "(a)(b)"
    assert shown(LOOPING, [{"role": "wizard", "content": "Hi"}]) == "(Hi)"


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}


def test_null_stays_before_tool_calls_where_the_template_takes_it() -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    looking = "{% for m in messages %}{{ m.content is none }}{% endfor %}"
    assert shown(looking, [calling]) == "True"
    assert shown(looking, [{"role": "assistant", "content": None}]) == "False"
    assert shown(STRINGS, [calling]) == "a:;"
    assert shown(LOOPING, [calling]) == ""


def test_arguments_become_objects_and_input_stays() -> None:
    call = json.loads(json.dumps(CALL))
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.arguments.a[1] }}{% endfor %}"
    assert shown(source, messages) == "é"
    assert call == CALL


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_under_its_names(name: str) -> None:
    source = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    assert shown(source, [{"role": "assistant", "content": "x", name: "why"}]) == "why why"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["x"],
        [{"content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [3]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "content": "", "tool_calls": [3]}],
        [{"role": "assistant", "content": "", "tool_calls": "x"}],
    ],
)
def test_malformed_messages(messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shown(CHATML, messages)
    assert caught.value.field == "messages" and "\n" not in str(caught.value)


def test_continue_final_message() -> None:
    answer = {"role": "assistant", "content": "Sure, "}
    assert shown(CHATML, [*USER, answer], continued=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nSure, "
    )
    trimming = "{% for m in messages %}[{{ m.content|trim }}]{% endfor %}"
    assert shown(trimming, [*USER, answer], continued=True) == "[Hi][Sure,"
    # The same text once more after the message: what counts is where the message ends.
    assert shown(STRINGS + "{{ 'Sure, no' }}", [*USER, answer], continued=True) == "u:Hi;a:Sure, "
    parts = [{"role": "user", "content": PARTS}]
    assert shown(LOOPING, parts, continued=True) == "(a)(b"
    for source, messages in (("{{ 1 }}", USER), (CHATML, [{"role": "user", "content": ""}])):
        with pytest.raises(InvalidRequest, match="continue_final_message"):
            shown(source, messages, continued=True)


def test_raise_exception_is_the_requests_fault() -> None:
    with pytest.raises(InvalidRequest, match="no system role") as caught:
        shown("{{ raise_exception('no\nsystem role') }}")
    assert caught.value.field == "messages" and not isinstance(caught.value, ChatTemplateError)


def test_the_environment_is_transformers() -> None:
    assert shown("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert shown("{{ 'one two  three'|wordcount }}{{ 'x'|center(3) }}{{ [1, 2, 3]|batch(2)|list }}") == (
        "3 x [[1, 2], [3]]"
    )
    jinja = jinja2.sandbox.ImmutableSandboxedEnvironment()
    ours = chat_environment()
    assert ours.filters.keys() == jinja.filters.keys() and ours.tests.keys() == jinja.tests.keys()
    assert ours.globals.keys() - jinja.globals.keys() == {"raise_exception", "strftime_now"}
    assert shown("{{ dict(a=1).a }}{{ dict.fromkeys([1]) }}{{ namespace({'a': 2}, self=3).self }}") == "1{1: None}3"
    # What is set inside of a generation block is not seen after it.
    assert shown("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}") == "21"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'in 2024: %s, %05d%%' % ('x', 7) }}", "in 2024: x, 00007%"),
        ("{{ '{{\"year\": 20240, {:>3}}}'.format(1) }}", '{"year": 20240,   1}'),
        ("{{ messages[0].get('n', 40960) + 8192 }}", "49152"),
        ("{{ messages[0].n|default(40960) }}", "40960"),
        ("{{ ([1, 2] + [3]) | join('-') ~ 'x' ~ 4 }}", "1-2-3x4"),
        ("{{ {'b': '<é>', 'a': none}|tojson(sort_keys=true) }}", '{"a": null, "b": "<é>"}'),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
    ],
)
def test_ordinary_expressions(source: str, text: str) -> None:
    assert shown(source) == text


class Role(str):
    """A subclass of str, as enums of strings are."""


class Answer:
    """A message as the openai package returns it."""

    def model_dump(self, *, exclude_none: bool) -> dict[str, Any]:
        assert exclude_none
        return {"role": "assistant", "content": "A"}


def test_what_is_not_plain_data() -> None:
    assert shown(STRINGS, [{"role": Role("user"), "content": "Hi"}, Answer()]) == "u:Hi;a:A;"
    with pytest.raises(InvalidRequest, match="a function cannot be given") as caught:
        shown(STRINGS, tools=[lambda: 0])
    assert caught.value.field == "tools"
    nested: Any = Role("x")
    for _ in range(500):
        nested = [nested]
    with pytest.raises(InvalidRequest, match="nested more than"):
        shown(STRINGS, deep=nested)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(), items, max_size=3),
        max_leaves=8,
    )
)
def test_data_arrives_as_it_was_sent(value: Any) -> None:
    request = RenderRequest(source="x", messages=[value], variables={"value": value}, continue_final_message=True)
    assert RenderRequest.from_bytes(request.to_bytes()) == request


def call(id: str, value: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": {"x": value}}}


CALLS: list[dict[str, Any]] = [
    *USER,
    {"role": "assistant", "content": "Let me see", "tool_calls": [call("call_1", "a"), call("call_2", "b")]},
    {"role": "tool", "tool_call_id": "call_2", "content": "B"},
    {"role": "tool", "tool_call_id": "call_1", "content": "A"},
    {"role": "tool", "tool_call_id": "call_3", "content": "C"},
]


def test_several_calls_become_messages_of_one_call_where_the_template_wants_that() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one') }}"
        "{% endif %}{{ m.content ~ '(' ~ m.tool_calls[0].function.arguments.x ~ ')' }}"
        "{% else %}{{ m.role[0] + ':' + m.content }}{% endif %};{% endfor %}"
    )
    assert compile_template(source).forms.single_calls
    assert shown(source, CALLS) == "u:Hi;Let me see(a);t:A;(b);t:B;t:C;"
    assert not compile_template(STRINGS).forms.single_calls


def test_ids_are_made_short_where_the_template_wants_that() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('9') }}"
        "{% endif %}{{ c.id + ' ' }}{% endfor %}{{ m.tool_call_id or '' }} {% endfor %}"
    )
    assert compile_template(source).forms.short_ids
    first, second, *of = shown(source, CALLS).split()
    assert of[:2] == [second, first] and first != second and len({first, second, *of}) == 3
    own = [*USER, {"role": "assistant", "content": "", "tool_calls": [call("abcdefgh1", "a")]}]
    assert shown(source, own).split() == ["abcdefgh1"]
