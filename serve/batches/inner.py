"""Requests that the server makes to its own routes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass(frozen=True)
class Answer:
    """What came back.

    Args:
        retry_after: seconds after which to ask again; None: that makes no sense.
    """

    status: int
    request_id: str
    body: bytes
    retry_after: float | None = None


async def ask(app: ASGIApp, path: str, body: bytes, *, state: Mapping[str, Any]) -> Answer:
    """Posts JSON to a path of an application.

    Args:
        state: ASGI state of the request, which says who owns it.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "state": dict(state),
    }
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    pieces: list[bytes] = []
    start: Message = {}

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # its client never leaves; canceling the request's task ends it
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    headers = dict(start["headers"])
    retry = headers.get(b"retry-after")
    return Answer(
        status=start["status"],
        request_id=headers.get(b"x-request-id", b"").decode(),
        body=b"".join(pieces),
        retry_after=None if retry is None or start["status"] != 503 else float(retry),
    )
