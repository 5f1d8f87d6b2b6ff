"""Ollama's messages as a chat's."""

from __future__ import annotations

from typing import Any

import pytest

from llmjax.serve.errors import ApiError
from llmjax.serve.ollama.conversation import messages_of
from llmjax.serve.protocol.ollama import OllamaMessage


def made(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    found = messages_of([OllamaMessage.model_validate(message) for message in messages])
    return [message.model_dump(exclude_unset=True) for message in found]


def call(name: str, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {"n": 1}}, **more}


def test_results_belong_to_calls_by_id_by_name_or_in_order() -> None:
    asked = {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b"), call("a", id="own"), call("a")]}
    results = [
        {"role": "tool", "content": "1", "tool_name": "b"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3", "tool_call_id": "own"},
        {"role": "tool", "content": "4", "tool_name": "a"},
        {"role": "tool", "content": "5", "tool_name": "c"},
    ]
    first, *others = made(asked, *results)
    assert [one["id"] for one in first["tool_calls"]] == ["call_0_0", "call_0_1", "own", "call_0_3"]
    ids = [(other["tool_call_id"], other["name"]) for other in others]
    assert ids == [("call_0_1", "b"), ("call_0_0", "a"), ("own", "a"), ("call_0_3", "a"), ("call_5", "c")]


def test_pictures_stand_before_the_text() -> None:
    (message,) = made({"role": "user", "content": "What?", "images": ["aGk="]})
    picture, text = message["content"]
    assert picture == {"type": "image", "source": {"type": "base64", "data": "aGk="}}
    assert text == {"type": "text", "text": "What?"}


def test_thoughts_are_kept_and_a_call_needs_a_name() -> None:
    (message,) = made({"role": "assistant", "content": "x", "thinking": "y"})
    assert message == {"role": "assistant", "content": "x", "reasoning_content": "y"}
    with pytest.raises(ApiError, match=r"`messages.0.tool_calls.0.function` must have a name"):
        made({"role": "assistant", "tool_calls": [{"function": {}}]})
