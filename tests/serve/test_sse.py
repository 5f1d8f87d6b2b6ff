"""The event stream on its own: comments when idle, errors before and after the start, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from llmjax.serve.context import RequestRecord
from llmjax.serve.errors import ApiError, ClientDisconnected
from llmjax.serve.sse import EventStream
from tests import virtual_time


def play(
    events: AsyncGenerator[bytes, None],
    *,
    keep_alive: float = 3600,
    timeout: float | None = None,
    leaves_after: float = 3600,
) -> list[dict[str, Any]]:
    """The ASGI messages that a stream sends."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.sleep(leaves_after)
        return {"type": "http.disconnect"}

    async def main() -> None:
        scope = {"type": "http", "state": {"record": RequestRecord(id="x", started=0)}}
        await EventStream(events, keep_alive=keep_alive, timeout=timeout)(scope, receive, send)

    virtual_time.run(main())
    return sent


def body(sent: list[dict[str, Any]]) -> bytes:
    assert sent[0]["type"] == "http.response.start" and sent[0]["status"] == 200
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return b"".join(message["body"] for message in sent[1:])


async def events(*items: bytes | float | Exception, closed: Callable[[], None] = lambda: None) -> Any:
    """Yields bytes, sleeps for numbers, raises exceptions."""
    try:
        for item in items:
            match item:
                case bytes():
                    yield item
                case Exception():
                    raise item
                case _:
                    await asyncio.sleep(item)
    finally:
        closed()


def test_events_then_done() -> None:
    assert body(play(events(b"data: 1\n\n", b"data: 2\n\n"))) == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


def test_comments_while_idle_even_before_the_first_event() -> None:
    comment, one = b": keep-alive\n\n", b"data: 1\n\n"
    assert body(play(events(25, one, 15), keep_alive=10)) == 2 * comment + one + comment + b"data: [DONE]\n\n"
    assert body(play(events(9, one, 9, one), keep_alive=10)) == 2 * one + b"data: [DONE]\n\n"
    assert body(play(events(25, one), keep_alive=0)) == one + b"data: [DONE]\n\n"


def test_error_before_the_first_event_keeps_its_status() -> None:
    with pytest.raises(ApiError) as error:
        play(events(ApiError("no", status=503)))
    assert error.value.status == 503


def test_error_after_the_first_event_becomes_an_event() -> None:
    text = body(play(events(b"data: 1\n\n", ApiError("no", status=503, code="c"))))
    assert text == (
        b'data: 1\n\ndata: {"error":{"message":"no","type":"server_error","param":null,"code":"c"}}\n\ndata: [DONE]\n\n'
    )


def test_unexpected_error_is_not_shown() -> None:
    text = body(play(events(b"data: 1\n\n", ZeroDivisionError("secret"))))
    assert b"secret" not in text and b"internal error" in text and text.endswith(b"data: [DONE]\n\n")


def test_leaving_client_closes_the_events_at_once() -> None:
    closed: list[bool] = []
    sent = play(events(b"data: 1\n\n", 60, closed=lambda: closed.append(True)), leaves_after=5)
    assert closed == [True] and len(sent) == 2
    with pytest.raises(ClientDisconnected):
        play(events(60, closed=lambda: closed.append(True)), leaves_after=5)
    assert closed == [True, True]


def test_timeout() -> None:
    text = body(play(events(b"data: 1\n\n", 60), timeout=50))
    assert b"longer than 50 s" in text and text.endswith(b"data: [DONE]\n\n")
    with pytest.raises(ApiError) as error:
        play(events(60), timeout=50)
    assert error.value.status == 504
