"""Volatile lines of system prompts: which they are, where they go, and that what is left stays in the prefix cache."""

from __future__ import annotations

import re
from typing import Any

import pytest

from llmjax.config import ConfigError, ServerConfig
from llmjax.serve.volatile_lines import VolatileLines
from tests.serve.conftest import Running

VOLATILE = (
    "Current time: 2026-11-29 03:15:44 UTC",
    "- The current date and time is Sunday, 29 November 2026, 3:15 AM.",
    "Today's date is 2026-11-29T03:15:44Z",
    "<current_datetime>local: 2026-11-29 03:15</current_datetime>",
    "UTC time = 03:15",
    "**Current Time (Europe/Paris):** 03:15",
    "timestamp: 1764386144",
    "Request ID: 0b6ff9a1-7c1d-4c70-a1f5-6a7c1a3c0fd5",
    "message_id=abcdef0123456789",
)
STEADY = (
    "Today's date is 2026-11-29",
    "You are a helpful assistant.",
    "Our meetings are at 10:30.",
    "If the current time is not known, ask for it.",
    "Session rules: be brief.",
    "Ratio: 16:9",
    "Request: please answer.",
    "",
    "Current time: " + "x" * 300 + " 10:30",
)


@pytest.mark.parametrize("line", VOLATILE)
def test_what_is_volatile(line: str) -> None:
    system = {"role": "system", "content": f"You help.\n{line}\nBe brief."}
    moved, lines = VolatileLines().moved([system, {"role": "user", "content": "Hello"}])
    assert lines == [line]
    assert [message["content"] for message in moved] == ["You help.\nBe brief.", "Hello", line]


@pytest.mark.parametrize("line", STEADY)
def test_what_is_not(line: str) -> None:
    messages = [{"role": "system", "content": line}, {"role": "user", "content": "Hello"}]
    assert VolatileLines().moved(messages) == (messages, [])


def test_lines_stand_behind_what_is_to_be_answered() -> None:
    line = VOLATILE[0]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": f"{line}\nYou help."}]},
        {"role": "system", "content": "Steady."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"See.\n{line}"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It"},
    ]
    moved, lines = VolatileLines().moved(messages)
    assert lines == [line]
    assert moved[0]["content"] == [{"type": "text", "text": "You help."}]
    assert moved[1:] == [*messages[1:5], {"role": "system", "content": line}, messages[5]]


def test_nothing_is_moved_where_nobody_asks() -> None:
    messages = [{"role": "system", "content": VOLATILE[0]}, {"role": "assistant", "content": "Hi"}]
    assert VolatileLines().moved(messages) == (messages, [])


def test_settings() -> None:
    assert VolatileLines.of("none") is None
    own = VolatileLines.of("weather: .*")
    assert own is not None
    moved, lines = own.moved([{"role": "system", "content": "Weather: rain"}, {"role": "user", "content": "Hi"}])
    assert moved == [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Weather: rain"}]
    assert lines == ["Weather: rain"]
    with pytest.raises(ConfigError, match="volatile_lines"):
        ServerConfig(volatile_lines="(")


def test_no_line_takes_long() -> None:
    """A line of the greatest length that begins as a volatile one does and does not end so."""
    pattern = re.compile(VolatileLines().pattern, re.IGNORECASE)
    for line in ("current " + "is " * 80, "* " * 128, "current time" + ": " * 120, "id " * 85):
        assert pattern.fullmatch(line[:256]) is None


def test_the_history_is_found_again(running: Running) -> None:
    rules = "\n".join(f"Rule {i}: the one that comes after the one before." for i in range(6))
    history: list[dict[str, str]] = [{"role": "user", "content": "hello"}]

    def asked(minute: int) -> Any:
        system = {"role": "system", "content": f"Current time: 2026-11-29 03:{minute}\n{rules}"}
        body = {"messages": [system, *history], "max_tokens": 2, "temperature": 0}
        with running.http() as http:
            response = http.post("/v1/chat/completions", json=body)
        assert response.headers["x-moved-lines"] == "1"
        return response.json()

    first = asked(15)
    history += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "go on"}]
    usage = asked(16)["usage"]
    page = running.engine.config.page_size or 32
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 40 - page
