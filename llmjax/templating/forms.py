"""In which form a template takes content and arguments, found out by rendering small conversations with it.

Templates differ: most take content as a string, some only as a list of parts, some both, and this by role; some fail
where content is null; a few want the arguments of tool calls as a string of JSON; many take a system message as the
first one alone. What a message holds stays as it is wherever the template takes it so, as in transformers, and is
converted only elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2

from llmjax.templating.systems import SYSTEM, Systems, placed

_TEXT, _OTHER_TEXT, _KEY, _VALUE = "Wozu0dient7das", "Noch4mehr9davon", "feld3name", "feld8wert"
_NO_JSON = f'{{"{_KEY}": "{_VALUE}'
UNREAD = "arguments"  # of arguments that are not an object, where the template needs one: what holds their text
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "A text"}}},
    },
}
_USER = {"role": "user", "content": "Hi"}
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_ROLES = ("user", "system", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Forms:
    """What a template takes.

    Args:
        only_parts: roles whose content must be a list of parts.
        parts: roles whose content may be one. A role that was not probed goes like ``user``.
        null: whether content may be None beside tool calls.
        text_arguments: whether the arguments of tool calls must be a string of JSON.
        raw_arguments: whether they may be a text, and any text, where they need not be.
        single_calls: whether a message may hold one call only.
        short_ids: whether ids of calls must have nine letters and digits.
        systems: where system messages may stand.
    """

    only_parts: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    null: bool = False
    text_arguments: bool = False
    raw_arguments: bool = False
    single_calls: bool = False
    short_ids: bool = False
    systems: Systems = Systems.ANYWHERE

    def fitted(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Checked messages in the forms that the template takes."""
        turns = placed(messages, self.systems)
        return [self._fitted(turn) for turn in (_one_by_one(turns) if self.single_calls else turns)]

    def _fitted(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls")
        if calls:
            message = {**message, "tool_calls": [self._fitted_call(call) for call in calls]}
        if self.short_ids:
            message = _with_short_ids(message)
        role = message["role"] if message["role"] in _ROLES else "user"
        content = message["content"]
        if content is None:
            if calls and self.null:
                return message
            content = [] if role in self.only_parts else ""
        elif isinstance(content, str):
            if role in self.only_parts:
                content = [{"type": "text", "text": content}]
        elif role not in self.parts:
            content = "\n".join([part["text"] for part in content])
        return {**message, "content": content}

    def _fitted_call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            taken = self.text_arguments or self.raw_arguments
            return call if taken else {**call, "function": {**call["function"], "arguments": {UNREAD: arguments}}}
        return _with_text_arguments(call) if self.text_arguments else call


def forms_of(template: jinja2.Template) -> Forms:
    """Probes a template. Whatever it cannot render tells nothing, and the usual form is taken."""
    # Content of None or "", arguments as an object or a string: what each gives, None where it fails.
    calls = {
        (content, text): _rendered(template, _with_call({"role": "tool", "content": "1"}, content, text=text))
        for content in (None, "")
        for text in (False, True)
    }
    null = any(calls[None, text] is not None for text in (False, True))
    content = None if null else ""
    text_arguments = _shows_json(calls[content, True]) and not _shows_object(calls[content, False])
    one_call = calls[content, text_arguments] is not None
    single_calls = one_call and _rendered(template, _with_two_calls(content, text=text_arguments)) is None
    only_parts, parts = set(), set()
    for role in _ROLES:
        strings = _rendered(template, _conversation(role, _TEXT, null=null, text=text_arguments))
        listed = _rendered(
            template, _conversation(role, [{"type": "text", "text": _TEXT}], null=null, text=text_arguments)
        )
        if strings is not None and _TEXT in strings:
            if strings == listed:
                parts.add(role)
        elif listed is not None and _TEXT in listed:
            only_parts.add(role)
            parts.add(role)
        elif role != "user":  # a role that the template does not know
            only_parts |= {role} if "user" in only_parts else set()
            parts |= {role} if "user" in parts else set()
    forms = Forms(
        only_parts=frozenset(only_parts),
        parts=frozenset(parts),
        null=null,
        text_arguments=text_arguments,
        raw_arguments=not text_arguments and _NO_JSON in (_rendered(template, _with_no_json(content)) or ""),
        single_calls=single_calls,
        short_ids=one_call and _rendered(template, _with_long_ids(content, text=text_arguments)) is None,
    )
    return replace(forms, systems=_systems(template, forms))


def _systems(template: jinja2.Template, forms: Forms) -> Systems:
    def prompt(*messages: dict[str, Any]) -> str | None:
        return _rendered(template, forms.fitted(messages))

    def shown(*messages: dict[str, Any]) -> bool:
        text = prompt(*messages)
        return text is not None and _TEXT in text and _OTHER_TEXT in text

    system, other = ({"role": SYSTEM, "content": text} for text in (_TEXT, _OTHER_TEXT))
    answer = {"role": "assistant", "content": "Yes"}
    if (one := prompt(system, _USER)) is None and prompt(_USER) is not None:
        return Systems.NOWHERE
    if one is None or _TEXT not in one:  # it fails anyway, or leaves out all system messages, which is its affair
        return Systems.ANYWHERE
    if not shown(system, other, _USER):
        return Systems.FIRST
    later = shown(system, _USER, other) and shown(system, _USER, answer, other, _USER)
    return Systems.ANYWHERE if later else Systems.BEGINNING


def _one_by_one(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with several calls as one message a call, each followed by its result."""
    turns: list[dict[str, Any]] = []
    queue = list(reversed(messages))
    while queue:
        message = queue.pop()
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            turns.append(message)
            continue
        results = []
        while queue and queue[-1]["role"] == "tool":
            results.append(queue.pop())
        answered: set[int] = set()
        by_id = {one.get("tool_call_id"): one for one in results}
        for place, call in enumerate(calls):
            turns.append({**message, "content": message["content"] if place == 0 else "", "tool_calls": [call]})
            if (result := by_id.pop(call.get("id"), None)) is not None:
                turns.append(result)
                answered.add(id(result))
        turns += [one for one in results if id(one) not in answered]
    return turns


def _conversation(role: str, content: Any, *, null: bool, text: bool) -> list[dict[str, Any]]:
    """A conversation that holds a message of this role where templates expect one."""
    message = {"role": role, "content": content}
    if role == "tool":
        return _with_call(message, None if null else "", text=text)
    if role == "assistant":
        return [_USER, message, _USER]
    return [message] if role == "user" else [message, _USER]


def _with_call(result: dict[str, Any], content: str | None, *, text: bool) -> list[dict[str, Any]]:
    function = {"name": "probe", "arguments": {_KEY: _VALUE}}
    call = {"id": "probe1234", "type": "function", "function": function}  # Mistral's ids have nine letters and digits
    call = _with_text_arguments(call) if text else call
    return [
        _USER,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {**result, "name": "probe", "tool_call_id": "probe1234"},
    ]


def _with_no_json(content: str | None) -> list[dict[str, Any]]:
    user, message, result = _with_call({"role": "tool", "content": "1"}, content, text=False)
    (call,) = message["tool_calls"]
    broken = {**call, "function": {**call["function"], "arguments": _NO_JSON}}
    return [user, {**message, "tool_calls": [broken]}, result]


def _with_two_calls(content: str | None, *, text: bool) -> list[dict[str, Any]]:
    user, message, result = _with_call({"role": "tool", "content": "1"}, content, text=text)
    (call,) = message["tool_calls"]
    other = "probe5678"
    calls = [call, {**call, "id": other}]
    return [user, {**message, "tool_calls": calls}, result, {**result, "tool_call_id": other}]


def _with_long_ids(content: str | None, *, text: bool) -> list[dict[str, Any]]:
    user, message, result = _with_call({"role": "tool", "content": "1"}, content, text=text)
    (call,) = message["tool_calls"]
    long = "call_0123456789abcdef"
    return [user, {**message, "tool_calls": [{**call, "id": long}]}, {**result, "tool_call_id": long}]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if isinstance(of := message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short_id(of)
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} if isinstance(call.get("id"), str) else call for call in calls
        ]
    return changed


def _short_id(text: str) -> str:
    if _SHORT_ID.fullmatch(text):
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _rendered(template: jinja2.Template, messages: list[dict[str, Any]]) -> str | None:
    variables = {
        "messages": messages,
        "tools": [_TOOL] if any("tool_calls" in message for message in messages) else None,
        "documents": None,
        "add_generation_prompt": False,
        "bos_token": "",
        "eos_token": "",
    }
    try:
        return template.render(variables)
    except MemoryError:
        raise
    except Exception:  # a template may fail in any way; all that counts is that it did
        return None


def _shows_json(prompt: str | None) -> bool:
    return prompt is not None and json.dumps({_KEY: _VALUE}) in prompt


def _shows_object(prompt: str | None) -> bool:
    """Whether the arguments are there, and not as Python writes them."""
    return prompt is not None and _VALUE in prompt and f"{{'{_KEY}'" not in prompt
