"""Chat templates: equal to transformers' rendering, and harmless whatever they say."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmjax.errors import InvalidRequest, TokenizerError
from llmjax.tokenizer import ChatTemplate
from llmjax.tokenizer.builtin_templates import BUILTIN_TEMPLATES

USER = [{"role": "user", "content": "Hi"}]
CHAT = [
    {"role": "system", "content": "S"},
    *USER,
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "B"},
]


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    return ChatTemplate.from_text(source).render(messages, variables=variables)


def test_equals_transformers(golden: Callable[[str], Any]) -> None:
    for case in golden("templates"):
        variables = {
            **case["variables"],
            "tools": case["tools"],
            "documents": None,
            "add_generation_prompt": case["prompt"],
        }
        assert render(case["template"], case["messages"], **variables) == case["text"], case["name"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "chatml",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
            "<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("llama2", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nHi [/INST] A </s><s>[INST] B [/INST]"),
        ("mistral", "<s>[INST] S\n\nHi [/INST] A</s>[INST] B [/INST]"),
        (
            "gemma",
            "<s><start_of_turn>user\nS\n\nHi<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
            "<start_of_turn>user\nB<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("zephyr", "<|system|>\nS</s>\n<|user|>\nHi</s>\n<|assistant|>\nA</s>\n<|user|>\nB</s>\n<|assistant|>\n"),
    ],
)
def test_builtin_forms(name: str, text: str) -> None:
    assert render(name, CHAT, bos_token="<s>", eos_token="</s>", add_generation_prompt=True) == text


def test_every_builtin_renders() -> None:
    for name in BUILTIN_TEMPLATES:
        assert "Hi" in render(name, add_generation_prompt=True)


def test_arguments_become_objects_and_input_stays() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.arguments.a[1] }}{% endfor %}"
    assert render(source, messages) == "é"
    assert call["function"]["arguments"] == '{"a": [1, "é"]}'


def test_content_parts_are_flattened_where_the_template_wants_strings() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render("{{ messages[0].content }}", parts) == "a\nb"
    looping = "{% set c = messages[0]['content'] %}{% for p in c %}({{ p.text }}){% endfor %}"
    assert render(looping, parts) == "(a)(b)"
    assert render(looping, USER) == "(Hi)"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["x"],
        [{"content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{"}}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "[1]"}}]}],
        [{"role": "assistant", "content": "", "tool_calls": [3]}],
    ],
)
def test_malformed_messages(messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("chatml", messages)
    assert caught.value.field == "messages" and "\n" not in str(caught.value)


def test_continue_final_message() -> None:
    template = ChatTemplate.from_text("chatml")
    messages = [*USER, {"role": "assistant", "content": "Sure, "}]
    text = template.render(messages, variables={"add_generation_prompt": False}, continue_final_message=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nSure, "
    trimming = ChatTemplate.from_text("{% for m in messages %}[{{ m.content|trim }}]{% endfor %}")
    assert trimming.render(messages, variables={}, continue_final_message=True) == "[Hi][Sure,"
    with pytest.raises(InvalidRequest):
        ChatTemplate.from_text("{{ 1 }}").render(messages, variables={}, continue_final_message=True)


def test_tool_use_template_serves_requests_with_tools() -> None:
    template = ChatTemplate({"default": "d", "tool_use": "t"})
    assert template.render(USER, variables={"tools": None}) == "d"
    assert template.render(USER, variables={"tools": [{}]}) == "t"


def test_raise_exception_is_the_requests_fault() -> None:
    with pytest.raises(InvalidRequest, match="no system role"):
        render("{{ raise_exception('no\nsystem role') }}")


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_not_a_template(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="chatml"):
        ChatTemplate.from_text("nonsense")
    path = tmp_path / "t.jinja"
    path.write_text("{{ 1 + 1 }}")
    assert ChatTemplate.from_setting(str(path)).render(USER, variables={}) == "2"
    with pytest.raises(TokenizerError, match="neither Jinja, nor a file"):
        ChatTemplate.from_setting(str(tmp_path / "absent"))
    # A request may not read files.
    with pytest.raises(TokenizerError):
        ChatTemplate.from_text(str(path))


def test_folder_order(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert ChatTemplate.from_folder(tmp_path, {}) is None
    found = ChatTemplate.from_folder(tmp_path, {"chat_template": listed})
    assert found is not None and found.sources == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "c"}))
    found = ChatTemplate.from_folder(tmp_path, {"chat_template": "a"})
    assert found is not None and found.sources == {"default": "c"}
    (tmp_path / "chat_template.jinja").write_text("d")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("e")
    found = ChatTemplate.from_folder(tmp_path, {})
    assert found is not None and found.sources == {"default": "d", "tool_use": "e"}
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"chat_template\.json"):
        ChatTemplate.from_folder(tmp_path, {})


_GROW = "{% set ns = namespace(s=START, t=START) %}{% for i in range(60) %}{% set ns.s = STEP %}"
HOSTILE = {
    "endless loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "endless filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "endless map": "{{ range(99999)|map('string')|select('in', range(99999)|list)|list|length }}",
    "huge range": "{% for i in range(1000000000) %}x{% endfor %}",
    "huge output": "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "huge hidden output": "{% set x %}{% for i in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}{% endset %}",
    "huge string": "{{ 'x' * 1000000000 }}",
    "huge list": "{{ [1] * 1000000000 }}",
    "huge power": "{{ 10 ** 10 ** 8 }}",
    "huge product": _GROW.replace("START", "99999999").replace("STEP", "ns.s * ns.s") + "{% endfor %}",
    "doubling by ~": _GROW.replace("START", "'xxxx'").replace("STEP", "ns.s ~ ns.s") + "{% endfor %}",
    "doubling by +": _GROW.replace("START", "'xxxx'").replace("STEP", "ns.s + ns.s") + "{% endfor %}",
    "nested lists shown": _GROW.replace("START", "[1]").replace("STEP", "[ns.s, ns.s]") + "{% endfor %}{{ ns.s }}",
    "nested lists as JSON": _GROW.replace("START", "[1]").replace("STEP", "[ns.s, ns.s]")
    + "{% endfor %}{{ ns.s|tojson }}",
    "nested lists compared": _GROW.replace("START", "[1]").replace("STEP", "[ns.s, ns.s]")
    + "{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.s == ns.t }}",
    "replace": "{{ ('x' * 1000000)|replace('x', 'y' * 1000000) }}",
    "replace method": "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "join": "{{ range(90000)|join('y' * 1000000) }}",
    "join list": "{{ range(90000)|list|join('y' * 1000000) }}",
    "join method": "{{ ('y' * 1000000).join(range(90000)|map('string')|list) }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "date width": "{{ strftime_now('%1000000000d') }}",
    "indent": "{{ 'a\nb'|indent(1000000000) }}",
    "json indent": "{{ [1]|tojson(indent=1000000000) }}",
    "center": "{{ 'x'|center(1000000000) }}",
    "center method": "{{ 'x'.center(1000000000) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "attribute escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "global escape": "{{ raise_exception.__globals__['os'].system('true') }}",
    "context escape": "{{ self.__init__.__globals__ }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "undefined": "{{ x.y.z }}",
    "syntax": "{% for x in %}",
    "deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long source": "{{ 1 }}" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_an_error(name: str) -> None:
    start = time.monotonic()
    with pytest.raises((TokenizerError, InvalidRequest)) as caught:
        render(HOSTILE[name])
    assert time.monotonic() - start < 4  # 1.5 s by itself; the machine may be busy
    assert "\n" not in str(caught.value)


def test_internals_are_out_of_reach() -> None:
    assert render("{{ ''|attr('__class__') }}{{ ''['__class__'] }}{{ '{0.__class__}'.format('') }}") == ""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'in 2024: %s, %05d%%' % ('x', 7) }}", "in 2024: x, 00007%"),
        ("{{ '{} in 20240'.format('x') }}", "x in 20240"),
        ("{{ '{{\"year\": 20240, {:>3}}}'.format(1) }}", '{"year": 20240,   1}'),
        ("{{ messages[0].get('n', 40960) + 8192 }}", "49152"),
        ("{{ messages[0].n|default(40960) }}", "40960"),
        ("{{ (messages|length > 0) and 'a' in 'abc' and messages[0].role == 'user' }}", "True"),
        ("{{ '123456789'|int * 10 }}", "1234567890"),
        ("{{ ([1, 2] + [3]) | join('-') ~ 'x' ~ 4 }}", "1-2-3x4"),
    ],
)
def test_limits_leave_ordinary_expressions_alone(source: str, text: str) -> None:
    assert render(source) == text


def test_the_budget_is_per_rendering() -> None:
    template = ChatTemplate.from_text("{{ 'x' * 1000000 }}")
    for _ in range(600):
        template.render(USER, variables={})
