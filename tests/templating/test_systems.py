"""System messages anywhere in a conversation: both texts are in the prompt, and the others keep their order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.templating.rendering import compile_template, render
from llmjax.templating.systems import Systems, marked, placed
from llmjax.templating.wire import RenderRequest

SHOW = "{{ m.role[0] ~ ':' ~ m.content ~ ';' }}"
ANY = "{% for m in messages %}" + SHOW + "{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + SHOW + "{% endfor %}"
)
# Leaves out, without a word, what is not the first message.
DROPPING = "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + SHOW + "{% endif %}{% endfor %}"
LEADING = (
    "{% set ns = namespace(begun=false) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.begun = true %}"
    "{% elif m.role == 'system' and ns.begun %}{{ raise_exception('too late') }}{% endif %}" + SHOW + "{% endfor %}"
)
NONE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    + SHOW
    + "{% endfor %}"
)
ALTERNATING = (
    "{% set ns = namespace(turn=0) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('not first') }}{% endif %}"
    "{% elif m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}" + SHOW + "{% endfor %}"
)
NOTE = "<system>\n{}\n</system>".format


def say(text: str) -> list[dict[str, Any]]:
    """``s:A u:B`` as messages; ``c`` is an assistant's call."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "c": "assistant"}
    messages: list[dict[str, Any]] = []
    for piece in text.split():
        kind, content = piece.split(":")
        message: dict[str, Any] = {"role": roles[kind], "content": content}
        if kind == "c":
            message["tool_calls"] = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        elif kind == "t":
            message |= {"tool_call_id": "x", "name": "f"}
        messages.append(message)
    return messages


@pytest.mark.parametrize(
    ("template", "systems"),
    [
        (ANY, Systems.ANYWHERE),
        (STRICT, Systems.FIRST),
        (DROPPING, Systems.FIRST),
        (ALTERNATING, Systems.FIRST),
        (LEADING, Systems.BEGINNING),
        (NONE, Systems.NOWHERE),
        ("{{ raise_exception('never') }}", Systems.ANYWHERE),
        ("{% for m in messages if m.role != 'system' %}" + SHOW + "{% endfor %}", Systems.ANYWHERE),
    ],
)
def test_where_a_template_takes_them(template: str, systems: Systems) -> None:
    assert compile_template(template).forms.systems is systems


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (ANY, "s:A s:B u:C s:D u:E", "s:A;s:B;u:C;s:D;u:E;"),
        (LEADING, "s:A s:B u:C", "s:A;s:B;u:C;"),
        (STRICT, "s:A s:B u:C", "s:A\n\nB;u:C;"),
        (STRICT, "s:A u:C s:D", f"s:A;u:C\n\n{NOTE('D')};"),
        (STRICT, "u:C s:D", f"u:C\n\n{NOTE('D')};"),
        (DROPPING, "u:A a:B u:C s:D u:E", f"u:A;a:B;u:C\n\n{NOTE('D')};u:E;"),
        (LEADING, "s:A u:C a:D s:E u:F", f"s:A;u:C;a:D;u:{NOTE('E')}\n\nF;"),
        (ALTERNATING, "s:A u:B a:C s:D s:E", f"s:A;u:B;a:C;u:{NOTE('D')}\n\n{NOTE('E')};"),
        # Results directly follow their calls, and what follows them does not become the user's turn.
        (ALTERNATING, "u:A c:B s:C t:D t:E a:F", f"u:A;a:B;t:D;t:E\n\n{NOTE('C')};a:F;"),
        (ALTERNATING, "u:A c:B t:C s:D", f"u:A;a:B;t:C\n\n{NOTE('D')};"),
        (NONE, "s:A u:B a:C s:D u:E", f"u:A\n\nB;a:C;u:{NOTE('D')}\n\nE;"),
    ],
)
def test_both_texts_are_in_the_prompt(template: str, messages: str, prompt: str) -> None:
    assert render(RenderRequest(source=template, messages=say(messages)), max_chars=1000) == prompt


def test_parts_stay_parts() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    messages = [{"role": "user", "content": parts}, {"role": "system", "content": parts}]
    assert placed(messages, Systems.FIRST) == [
        {"role": "user", "content": [*parts, {"type": "text", "text": NOTE("A\nB")}]}
    ]
    assert messages[0]["content"] == parts


ROLES = st.sampled_from("suatc")


@given(st.lists(ROLES, min_size=1, max_size=8), st.sampled_from([Systems.FIRST, Systems.BEGINNING, Systems.NOWHERE]))
def test_nothing_is_lost_and_the_rest_keeps_its_order(roles: list[str], systems: Systems) -> None:
    messages = say(" ".join(f"{role}:{i}." for i, role in enumerate(roles)))
    found = placed(messages, systems)
    begin = next((i for i, role in enumerate(roles) if role != "s"), len(roles))
    kept = 0 if systems is Systems.NOWHERE else min(begin, 1 if systems is Systems.FIRST else begin)
    assert [turn["role"] == "system" for turn in found] == [True] * kept + [False] * (len(found) - kept)
    text = "|".join(turn["content"] for turn in found)
    for i, role in enumerate(roles):
        assert (marked(f"{i}.") if role == "s" and i >= begin else f"{i}.") in text
    others = [content for i, role in enumerate(roles) if role != "s" for content in [f"{i}."]]
    places = [text.index(content) for content in others]
    assert places == sorted(places)
    assert placed(messages, Systems.ANYWHERE) == messages
