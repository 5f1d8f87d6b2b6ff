"""The gate that closes when the server is told to stop: running requests finish, new ones are turned away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive


class Closing(Exception):
    """The gate closed before the whole of a request had come."""


class Gate:
    """Counts requests in progress; once closed it only gets emptier, and what has not come wholly then must leave."""

    def __init__(self) -> None:
        self.active = 0
        self.closed = False
        self._arriving: set[asyncio.Timeout] = set()  # each waits for a part of a request's body
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def passing(self) -> Iterator[None]:
        self.active += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.active -= 1
            if not self.active:
                self._empty.set()

    def close(self) -> None:
        """On the event loop's thread."""
        self.closed = True
        for waiting in self._arriving:
            waiting.reschedule(0)

    def until_closed(self, receive: Receive) -> Receive:
        """``receive`` of a request that is passing, but what closes the gate ends the waiting for its body.

        Raises:
            Closing: from what is returned.
        """
        complete = False

        async def part() -> Message:
            nonlocal complete
            if complete:  # what comes now is the client's leaving
                return await receive()
            try:
                async with asyncio.timeout(0 if self.closed else None) as waiting:
                    self._arriving.add(waiting)
                    try:
                        message = await receive()
                    finally:
                        self._arriving.remove(waiting)
            except TimeoutError:
                raise Closing from None
            complete = not message.get("more_body", False)
            return message

        return part

    async def wait_empty(self, *, timeout: float) -> bool:
        """True when the last request has left within ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
