"""The gate that closes when the server is told to stop: running requests finish, new ones are turned away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Counts requests in progress; once closed it only gets emptier."""

    def __init__(self) -> None:
        self.active = 0
        self.closed = False
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
        self.closed = True

    async def wait_empty(self, *, timeout: float) -> bool:
        """True when the last request has left within ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
