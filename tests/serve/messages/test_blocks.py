"""Anthropic's blocks as messages of a chat, whatever they hold."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmjax.serve.errors import ApiError
from llmjax.serve.messages.conversation import is_prefill, messages_of

JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TYPES = ["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"]
FIELDS = ["text", "thinking", "signature", "data", "id", "name", "input", "tool_use_id", "content"]
BLOCK = st.fixed_dictionaries({}, optional={"type": st.sampled_from(TYPES) | JSON, **dict.fromkeys(FIELDS, JSON)})
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": st.lists(BLOCK | JSON, max_size=3) | JSON,
    },
)


@given(st.none() | JSON, st.lists(MESSAGE, min_size=1, max_size=3))
def test_any_messages_are_read_or_refused(system: Any, messages: list[dict[str, Any]]) -> None:
    ignored: list[str] = []
    try:
        turns = messages_of(system, messages, ignored)
    except ApiError as error:
        assert error.status == 400 and (error.param or "").split(".")[0] in ("messages", "system")
    else:
        assert len(turns) >= len(messages) and len(ignored) <= sum(map(len, map(str, messages)))
        assert isinstance(is_prefill(messages), bool)
        assert all(turn.content is not None or turn.role == "assistant" for turn in turns)
