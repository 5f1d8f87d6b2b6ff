"""Responses that clients may come back to: so many, so large, so long, for each key by itself."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from llmjax.serve.errors import ApiError, cut, retry_later


class Run(Protocol):
    """What writes a response in the background."""

    @property
    def done(self) -> bool: ...

    @property
    def size(self) -> int:
        """Bytes that its events take."""

    def snapshot(self) -> dict[str, Any]:
        """The response as it is now."""

    def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """The events from number ``start`` on: those that have been, and those to come."""

    def cancel(self) -> None:
        """Ends it, unless it has ended."""


@dataclass(kw_only=True)
class StoredResponse:
    """A response, and what it was asked.

    Attributes:
        owner: whose it is; see `owner_of`.
        input: its items as JSON, those of the responses before it first.
        num_items: of its input.
        answer: the response as JSON; None: it is still written.
        run: that writes it, or has written it, in the background.
        expires: on the clock of the store.
    """

    id: str
    owner: str
    input: bytes
    num_items: int
    answer: bytes | None = None
    run: Run | None = None
    expires: float = 0.0

    @property
    def size(self) -> int:
        events = 0 if self.run is None else self.run.size
        return len(self.input) + len(self.answer or b"") + events

    @property
    def running(self) -> bool:
        return self.run is not None and not self.run.done

    def body(self) -> bytes:
        """The response as it is now."""
        if self.answer is not None:
            return self.answer
        assert self.run is not None
        return orjson.dumps(self.run.snapshot())

    def context(self) -> list[dict[str, Any]]:
        """The items that a response which follows this one begins with."""
        items: list[dict[str, Any]] = orjson.loads(self.input)
        return items + orjson.loads(self.body())["output"]


class ResponseStore:
    """Keeps responses in memory. Of one owner's, the oldest make room; those that are still written stay.

    Args:
        most: responses of one owner; 0: none are kept.
        most_bytes: that they may take.
        lifetime: seconds that each is kept.
        clock: seconds.
    """

    def __init__(
        self, *, most: int, most_bytes: int, lifetime: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lifetime = lifetime
        self._clock = clock
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}  # by owner, oldest first

    def check_room(self, owner: str) -> None:
        """Before a response in the background begins.

        Raises:
            ApiError: nothing is kept here, or as many are being written as are kept.
        """
        if not self._most:
            raise ApiError(
                "`background` needs a server that keeps responses (--max-stored-responses)",
                param="background",
                code="unsupported_parameter",
            )
        if sum(stored.running for stored in self._kept.get(owner, {}).values()) >= self._most:
            raise retry_later(f"{self._most} responses are being written already", seconds=1, code="queue_full")

    def put(self, stored: StoredResponse) -> None:
        """Keeps a response, unless it is too large."""
        if self._most:
            self._kept.setdefault(stored.owner, OrderedDict())[stored.id] = stored
            stored.expires = self._clock() + self._lifetime
            self.trim(stored.owner)

    def trim(self, owner: str) -> None:
        """Lets go of what is too old or too much."""
        self._drop_expired()
        kept = self._kept.get(owner, OrderedDict())
        count, size = len(kept), sum(stored.size for stored in kept.values())
        for stored in [stored for stored in kept.values() if not stored.running]:
            if count <= self._most and size <= self._most_bytes:
                break
            count, size = count - 1, size - stored.size
            del kept[stored.id]
        if not kept:
            self._kept.pop(owner, None)

    def get(self, owner: str, id: str, *, field: str | None = None) -> StoredResponse:
        """A response of one's own.

        Args:
            field: of the request, that names it.

        Raises:
            ApiError: 404, there is none.
        """
        self._drop_expired()
        kept = self._kept.get(owner)
        if kept is None or id not in kept:
            message = f"there is no response {cut(id)!r}, or it is not kept any more"
            raise ApiError(message, status=404, param=field, code="not_found")
        return kept[id]

    def delete(self, owner: str, id: str) -> None:
        """Forgets a response, and ends it if it is still written; raises ``ApiError`` like `get`."""
        stored = self.get(owner, id)
        if stored.run is not None:
            stored.run.cancel()
        self._kept[owner].pop(id, None)

    def _drop_expired(self) -> None:
        now = self._clock()
        for owner, kept in list(self._kept.items()):
            for stored in [stored for stored in kept.values() if stored.expires <= now and not stored.running]:
                del kept[stored.id]
            if not kept:
                del self._kept[owner]
