"""A response that is written whether or not its client listens, and can be listened to from any of its events on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, ExitStack, aclosing
from typing import Any

from llmjax.serve.errors import ApiError, as_api_error
from llmjax.serve.responses.writer import ResponseWriter
from llmjax.serve.sse import named_event

Events = AsyncGenerator[dict[str, Any], None]


class Background:
    """The `Run` of a stored response, in a task of its own; the server does not stop before it has ended.

    Args:
        writer: writes the response.
        events: events that it makes, from its beginning.
        passing: what keeps server and model there until the response has ended.
        timeout: seconds that the response may take, or None.
        ended: is called when it has ended.
    """

    def __init__(
        self,
        writer: ResponseWriter,
        events: Events,
        *,
        passing: AbstractContextManager[None],
        timeout: float | None,
        ended: Callable[[], None],
    ) -> None:
        self._writer = writer
        self.done = False
        self.size = 0  # bytes of events
        self._events: list[bytes] = []  # the place of an event is its sequence number
        self._news = asyncio.Event()
        self._ended = ended
        stack = ExitStack()
        stack.enter_context(passing)
        self._task = asyncio.create_task(self._run(events, timeout))
        self._task.add_done_callback(lambda _: stack.close())

    def snapshot(self) -> dict[str, Any]:
        return self._writer.snapshot()

    def cancel(self) -> None:
        if not self.done:
            self._task.cancel()
            self._writer.cancel()
            self._end()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        at = start
        while True:
            news = self._news
            while at < len(self._events):
                yield self._events[at]
                at += 1
            if self.done:
                return
            await news.wait()

    async def _run(self, events: Events, timeout: float | None) -> None:
        try:
            async with asyncio.timeout(timeout), aclosing(events):
                async for event in events:
                    self._add(event)
        except TimeoutError:
            self._fail(ApiError(f"the response took longer than {timeout:g} s", status=504))
        except Exception as error:
            self._fail(as_api_error(error))
        if not self.done:
            self._end()

    def _fail(self, error: ApiError) -> None:
        for event in self._writer.fail(error):
            self._add(event)

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(named_event(event))
        self.size += len(self._events[-1])
        self._wake()

    def _end(self) -> None:
        self.done = True
        self._ended()
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
