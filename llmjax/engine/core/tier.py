"""The interface of the tiers below the device, which keep KV pages in host memory, on disk and at other servers."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from llmjax.engine.core.page_pool import PageKey, PagePool
from llmjax.engine.core.stats import OffloadCounts
from llmjax.kv_transfer import KVTransfer

PageContent = tuple[npt.NDArray[Any], ...]
"""What a page holds in all layers of its group: one array [layers, …] for each array of the group's state, and the
parts of all devices."""

PageName = tuple[int, bytes]
"""The number of a group of layers, and the digest of a page's key."""


class Place(enum.IntEnum):
    """Where the content of a page is, the nearest place first."""

    DEVICE = 0  # in a page that the step being planned may read
    NEXT_STEP = 1  # in a page of the device that only later steps may read
    HOST = 2  # in host memory, to be restored with the step being planned
    DISK = 3  # on disk alone, to be fetched before it can be restored
    REMOTE = 4  # at another server, to be fetched likewise


@dataclass(frozen=True)
class KeptPage:
    """A page that is not on the device."""

    tokens: tuple[int, ...]  # as its key has them
    content: PageContent

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.content)


class Contents(Protocol):
    """Pages that are being read out."""

    def contents(self) -> list[PageContent]:
        """The content of each page; waits for the device."""


class PageDevice(Protocol):
    """The device's side of every move of pages."""

    def read_pages(self, group: int, pages: Sequence[int]) -> Contents:
        """Starts to read pages, with the content after all earlier dispatches have run."""

    def write_pages(self, group: int, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        """Writes pages before all later dispatches run."""


class Giver(Protocol):
    """Gives the pages of computed prompts to other servers."""

    def give(self, name: str, parts: list[tuple[int, list[PageKey], Contents]]) -> None:
        """Lets others take pages under a name.

        Args:
            name: what the other server asks for.
            parts: group, keys and contents of the pages, which are still being read out.
        """

    def close(self) -> None:
        """Ends it; waiting pages are dropped."""


class Tier(ABC):
    """All tiers below the device.

    A page is evicted from the device into host memory, and written to disk as well. If a later prompt finds it there,
    it is restored: written to a new page of the device before the step that reads it. A page on disk or at another
    server is first fetched into host memory, while the sequence that wants it waits outside the queue.
    """

    @abstractmethod
    def begin_plan(self) -> None:
        """Notes that a step is being planned: pages that earlier moves have brought can be found."""

    @abstractmethod
    def find(self, group: int, key: PageKey) -> Place | None:
        """Where a page is: ``HOST`` or ``DISK``; None: in neither."""

    @abstractmethod
    def evicted(self, group: int, page: int, key: PageKey) -> None:
        """Notes that a page of the device gets other content. `move` may still read the old content."""

    @abstractmethod
    def restore(self, group: int, key: PageKey, page: int) -> Place:
        """Plans to write a page that is in host memory to a page of the device.

        Returns:
            Where it was: ``DISK`` or ``REMOTE`` if it was fetched from there and has not been used since, else
            ``HOST``.
        """

    @abstractmethod
    def move(self, device: PageDevice) -> None:
        """Makes the planned moves, before the step that was planned with them is dispatched."""

    @abstractmethod
    def forget(self, group: int, key: PageKey) -> None:
        """Drops a page whose content cannot be relied on."""

    @abstractmethod
    def reset(self, *, everything: bool) -> None:
        """Drops the planned moves, because the device no longer holds what it held when they were planned.

        Args:
            everything: whether to drop all pages that are kept, too.
        """

    @abstractmethod
    def can_fetch(self, transfer: KVTransfer | None) -> bool:
        """Whether pages of a prompt may have to be fetched: there is a disk, or the request names another server."""

    @abstractmethod
    def takes(self, transfer: KVTransfer | None) -> bool:
        """Whether a request names another server that has computed its prompt, and pages are taken from others."""

    @property
    @abstractmethod
    def most_fetched(self) -> int:
        """Pages of every group that may be fetched together."""

    @abstractmethod
    def fetch(self, owner: Hashable, names: Sequence[PageName], transfer: KVTransfer | None) -> bool:
        """Starts to fetch pages into host memory, where they stay until `end_fetch`.

        Args:
            owner: identifies the one that waits for them.
            names: all pages that are to be restored together, those in host memory included.
            transfer: which other server has them; None: the disk has them.

        Returns:
            Whether there is something to wait for.
        """

    @abstractmethod
    def fetched(self, owner: Hashable, *, seconds: float) -> bool:
        """Whether an owner has nothing left to wait for, whether its pages have come or will not.

        Args:
            seconds: how long to wait for pages of any owner.
        """

    @abstractmethod
    def end_fetch(self, owner: Hashable) -> None:
        """Releases the pages that were fetched for an owner, if any were."""

    @abstractmethod
    def count_hits(self, tokens: Mapping[Place, int]) -> None:
        """Adds prompt tokens whose pages were found, by where they were."""

    @abstractmethod
    def take_counts(self) -> OffloadCounts:
        """The counts since the last call."""

    @abstractmethod
    def keep(self, device: PageDevice, pools: Sequence[PagePool]) -> None:
        """Writes to disk what the device has cached, so that a later start finds it."""


class NoTier(Tier):
    """No tier below the device: evicted pages are lost."""

    def begin_plan(self) -> None:
        return

    def find(self, group: int, key: PageKey) -> Place | None:
        return None

    def evicted(self, group: int, page: int, key: PageKey) -> None:
        return

    def restore(self, group: int, key: PageKey, page: int) -> Place:
        raise LookupError("a page that is nowhere cannot be restored")

    def move(self, device: PageDevice) -> None:
        return

    def forget(self, group: int, key: PageKey) -> None:
        return

    def reset(self, *, everything: bool) -> None:
        return

    def can_fetch(self, transfer: KVTransfer | None) -> bool:
        return False

    def takes(self, transfer: KVTransfer | None) -> bool:
        return False

    @property
    def most_fetched(self) -> int:
        return 0

    def fetch(self, owner: Hashable, names: Sequence[PageName], transfer: KVTransfer | None) -> bool:
        return False

    def fetched(self, owner: Hashable, *, seconds: float) -> bool:
        return True

    def end_fetch(self, owner: Hashable) -> None:
        return

    def count_hits(self, tokens: Mapping[Place, int]) -> None:
        return

    def take_counts(self) -> OffloadCounts:
        return OffloadCounts()

    def keep(self, device: PageDevice, pools: Sequence[PagePool]) -> None:
        return
