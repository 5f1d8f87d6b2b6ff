"""Responses that clients may come back to, with limits on number, size and age that hold for each API key."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from llmjax.serve.errors import ApiError, retry_later
from llmjax.serve.owned import OwnedStore


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
        owner: the API key that it belongs to; see `owner_of`.
        input: its items as JSON, those of the responses before it first.
        num_items: how many items its input has.
        answer: the response as JSON; None: it is still written.
        run: the background run that writes it, or has written it.
        expires: when it is dropped, on the store's clock.
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


def find_items(stored: Iterable[StoredResponse], ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """Items of responses, and of their input, that have one of ``ids``. For long ones it takes a while."""
    items: dict[str, dict[str, Any]] = {}
    for response in stored:
        if len(items) == len(ids):
            break
        if response.answer is not None:
            items_by_id = {item["id"]: item for item in response.context()}
            items = {id: item for id in ids if (item := items_by_id.get(id)) is not None} | items
    return items


class ResponseStore(OwnedStore[StoredResponse]):
    """Keeps responses; arguments are those of `OwnedStore`."""

    def __init__(
        self, *, most: int, most_bytes: int, lifetime: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__("response", most=most, most_bytes=most_bytes, lifetime=lifetime, clock=clock)

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
        if self.num_running(owner) >= self._most:
            raise retry_later(f"{self._most} responses are being written already", seconds=1, code="queue_full")

    def all(self, owner: str) -> list[StoredResponse]:
        """What one has here, the newest first."""
        return list(self._kept.get(owner, OrderedDict()).values())[::-1]

    def delete(self, owner: str, id: str) -> None:
        """Forgets a response, and ends it if it is still written; raises ``ApiError`` like `get`."""
        stored = self.get(owner, id)
        if stored.run is not None:
            stored.run.cancel()
        self._kept.get(owner, OrderedDict()).pop(id, None)
