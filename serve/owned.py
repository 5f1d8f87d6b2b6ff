"""The server's stores in memory, each with limits on number, size and age that hold for each API key."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from llmjax.serve.errors import ApiError, cut


class Owned(Protocol):
    """A thing that is kept.

    Attributes:
        owner: the API key that it belongs to; see `owner_of`.
        expires: when it is dropped, on the store's clock.
    """

    id: str
    owner: str
    expires: float

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def running(self) -> bool:
        """It is being worked on, and stays."""


T = TypeVar("T", bound=Owned)


class OwnedStore(Generic[T]):
    """Keeps things in memory. An owner's oldest things make room for new ones; those that are being worked on stay.

    Args:
        noun: what a thing is called in messages.
        most: how many one owner may have; 0: none are kept.
        most_bytes: how much one owner's may take.
        lifetime: seconds for which each is kept after it was last put here.
        clock: gives the time in seconds.
    """

    def __init__(
        self,
        noun: str,
        *,
        most: int,
        most_bytes: int,
        lifetime: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._noun = noun
        self._most = most
        self._most_bytes = most_bytes
        self._lifetime = lifetime
        self._clock = clock
        self._kept: dict[str, OrderedDict[str, T]] = {}  # by owner, oldest first

    def put(self, thing: T) -> None:
        """Keeps a thing as the newest of its owner's, unless it is too large."""
        if self._most:
            things = self._kept.setdefault(thing.owner, OrderedDict())
            things[thing.id] = thing
            things.move_to_end(thing.id)
            thing.expires = self._clock() + self._lifetime
            self.trim(thing.owner)

    def trim(self, owner: str) -> None:
        """Lets go of what is too old or too much."""
        self._drop_expired()
        things = self._kept.get(owner, OrderedDict())
        count, size = len(things), sum(thing.size for thing in things.values())
        for thing in [thing for thing in things.values() if not thing.running]:
            if count <= self._most and size <= self._most_bytes:
                break
            count, size = count - 1, size - thing.size
            del things[thing.id]
        if not things:
            self._kept.pop(owner, None)

    def find(self, owner: str, id: str) -> T | None:
        """The thing with this id, if it exists and belongs to this owner."""
        self._drop_expired()
        return self._kept.get(owner, OrderedDict()).get(id)

    def get(self, owner: str, id: str, *, field: str | None = None) -> T:
        """A thing of one's own.

        Args:
            field: the request's field that named it.

        Raises:
            ApiError: 404, there is none.
        """
        if (thing := self.find(owner, id)) is None:
            message = f"there is no {self._noun} {cut(id)!r}, or it is no longer kept"
            raise ApiError(message, status=404, param=field, code="not_found")
        return thing

    def delete(self, owner: str, id: str) -> None:
        """Forgets a thing; raises ``ApiError`` like `get`."""
        self.get(owner, id)
        self._kept[owner].pop(id)

    def num_running(self, owner: str) -> int:
        """How many of an owner's are being worked on."""
        return sum(thing.running for thing in self._kept.get(owner, OrderedDict()).values())

    def _drop_expired(self) -> None:
        now = self._clock()
        for owner, things in list(self._kept.items()):
            for thing in [thing for thing in things.values() if thing.expires <= now and not thing.running]:
                del things[thing.id]
            if not things:
                del self._kept[owner]
