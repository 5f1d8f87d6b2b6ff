"""KV offload: keeps pages evicted from the device in host memory and on disk, and restores them.

The engine's thread plans moves while it plans a step, and makes them before it dispatches that step: evicted pages are
read out before they are overwritten, restored pages are written before they are read. It waits only for the device, and
for no longer than the step before takes; the disk has its own threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from llmjax.engine.core.page_pool import PageKey, PagePool
from llmjax.engine.core.stats import OffloadCounts
from llmjax.engine.core.tier import Contents, KeptPage, PageContent, PageDevice, PageName, Place, Tier
from llmjax.engine.tiers.disk import DiskPages
from llmjax.engine.tiers.disk_thread import CLOSE_SECONDS, DiskThread
from llmjax.engine.tiers.host import HostPages
from llmjax.kv_transfer import KVTransfer

logger = logging.getLogger(__name__)

TAKERS = 4  # threads that take pages from other servers
QUEUED_BYTES = 256 * 2**20  # most bytes of pages that wait to be written to disk; further ones are not written
FETCH_SECONDS = 10.0  # how long a request waits for pages from disk before it computes them
BATCH = 16  # pages that are read out at once when the engine ends


class PagesLost(Exception):
    """The error that pages do not come from another server."""


class Taker(Protocol):
    """Takes pages from other servers."""

    def take(self, name: str, *, peer: str) -> Iterator[tuple[PageName, KeptPage]]:
        """Yields the pages that a server has under a name, perhaps more than are wanted; raises PagesLost."""


@dataclass(eq=False)
class _Fetch:
    """Pages that a request waits for.

    Attributes:
        names: pages on disk and in host memory, all of which stay there meanwhile.
        wanted: the pages on disk, or at another server.
        num_bytes: size of all of them.
        deadline: time.monotonic() after which the request no longer waits.
        cleared: how often everything had been forgotten before.
        transfer: which other server has them; None: the disk has them.
        done: whether all that can be had are in host memory.
        begun: whether they are being read.
        given_up: whether nobody wants them any more.
    """

    names: list[PageName]
    wanted: list[PageName]
    num_bytes: int
    deadline: float
    cleared: int
    transfer: KVTransfer | None = None
    done: bool = False
    begun: bool = False
    given_up: bool = False


@dataclass(frozen=True)
class _Reading:
    """Pages that the device reads out."""

    group: int
    keys: list[PageKey]
    pages: Contents


class Offload(Tier):
    """Pages in host memory, on disk and at other servers.

    Args:
        host: pages in memory.
        disk: pages in files; None: there are none.
        page_bytes: size of a page, by group.
        taker: takes pages from other servers; None: no pages are taken.
    """

    def __init__(
        self, host: HostPages, disk: DiskPages | None, *, page_bytes: Sequence[int], taker: Taker | None = None
    ) -> None:
        self._host = host
        self._disk = disk
        self._taker = taker
        self._page_bytes = page_bytes
        self._evicted: dict[PageName, tuple[int, PageKey]] = {}  # since the last moves
        self._restored: dict[tuple[int, int], tuple[PageKey, KeptPage]] = {}  # since then, by group and page
        self._reading: list[_Reading] = []
        self._fetches: dict[Hashable, _Fetch] = {}  # by owner
        self._to_begin: deque[_Fetch] = deque()
        self._fetched_bytes = 0  # bytes of the fetches that have begun and are in use
        self._came_from: dict[PageName, Place] = {}  # sources of pages in host memory that have not been used since
        self._cleared = 0  # times that everything was forgotten
        self._closed = False
        self._counts = OffloadCounts()
        self._writes = DiskThread("kv-to-disk") if disk is not None else None
        self._reads = DiskThread("kv-from-disk") if disk is not None else None
        self._takers: deque[DiskThread] = deque()
        self._arrived: deque[tuple[_Fetch, dict[PageName, KeptPage]]] = deque()
        self._arrival = threading.Event()

    def evicted(self, group: int, page: int, key: PageKey) -> None:
        name = (group, key.digest)
        if (restored := self._restored.pop((group, page), None)) is not None:
            self._keep(name, restored[1])  # it has not even come back
        elif self._host.find(group, key) is not None:
            self._host.use(name)
        else:
            self._evicted[name] = (page, key)

    def find(self, group: int, key: PageKey) -> Place | None:
        if self._host.find(group, key) is not None:
            return Place.HOST
        return Place.DISK if self._disk is not None and (group, key.digest) in self._disk else None

    def restore(self, group: int, key: PageKey, page: int) -> Place:
        kept, name = self._host.find(group, key), (group, key.digest)
        assert kept is not None
        self._host.use(name)
        self._restored[group, page] = (key, kept)
        return self._came_from.pop(name, Place.HOST)

    def count_hits(self, tokens: Mapping[Place, int]) -> None:
        self._count(**{f"{place.name.lower()}_hits": count for place, count in tokens.items()})

    def forget(self, group: int, key: PageKey) -> None:
        name = (group, key.digest)
        self._evicted.pop(name, None)
        self._settle()
        self._host.remove(name)
        self._came_from.pop(name, None)
        if self._disk is not None and self._writes is not None:
            self._writes.add(partial(self._disk.remove, name))

    def reset(self, *, everything: bool) -> None:
        self._settle()  # what the device has read out before is right
        self._evicted.clear()
        self._restored.clear()
        if everything:
            self._clear()

    def _clear(self) -> None:
        self._host.clear()
        self._came_from.clear()
        self._cleared += 1
        if self._disk is not None and self._writes is not None:
            self._disk.forget_all()
            self._writes.add(self._disk.remove_all)

    def begin_plan(self) -> None:
        self._settle()
        self._take_arrivals()
        self._begin_fetches()

    def move(self, device: PageDevice) -> None:
        groups: dict[int, list[tuple[int, PageKey]]] = {}
        for (group, _), evicted in self._evicted.items():
            groups.setdefault(group, []).append(evicted)
        self._evicted.clear()
        for group, pages in groups.items():
            reading = device.read_pages(group, [page for page, _ in pages])
            self._reading.append(_Reading(group, [key for _, key in pages], reading))
        back: dict[int, list[tuple[int, PageContent]]] = {}
        for (group, page), (_, kept) in self._restored.items():
            back.setdefault(group, []).append((page, kept.content))
            self._count(host_to_device_bytes=kept.num_bytes)
        self._restored.clear()
        for group, contents in back.items():
            device.write_pages(group, [page for page, _ in contents], [content for _, content in contents])

    # Disk and other servers

    def can_fetch(self, transfer: KVTransfer | None) -> bool:
        return self._disk is not None or self.takes(transfer)

    def takes(self, transfer: KVTransfer | None) -> bool:
        return self._taker is not None and transfer is not None and transfer.take is not None

    @property
    def most_fetched(self) -> int:
        return self._most_bytes // max(1, sum(self._page_bytes))

    @property
    def _most_bytes(self) -> int:
        """Bytes that may be fetched together."""
        return self._host.limit // 2

    def fetch(self, owner: Hashable, names: Sequence[PageName], transfer: KVTransfer | None) -> bool:
        wanted = [name for name in names if name not in self._host]
        if not wanted:
            return False
        size = sum(self._page_bytes[group] for group, _ in names)
        fetch = _Fetch(list(names), wanted, size, time.monotonic() + FETCH_SECONDS, self._cleared, transfer)
        self._host.pin(names)
        self._fetches[owner] = fetch
        self._to_begin.append(fetch)
        self._begin_fetches()
        return True

    def end_fetch(self, owner: Hashable) -> None:
        if (fetch := self._fetches.pop(owner, None)) is None:
            return
        fetch.given_up = True
        self._host.unpin(fetch.names)
        if fetch.begun:
            self._fetched_bytes -= fetch.num_bytes
        else:
            self._to_begin.remove(fetch)

    def fetched(self, owner: Hashable, *, seconds: float) -> bool:
        if (fetch := self._fetches.get(owner)) is None:
            return True
        if seconds and not fetch.done and not self._arrived:
            self._arrival.wait(seconds)
        self._take_arrivals()
        self._begin_fetches()
        return fetch.done or time.monotonic() > fetch.deadline

    def take_counts(self) -> OffloadCounts:
        taken, self._counts = self._counts, OffloadCounts()
        if self._writes is not None:
            taken = replace(taken, disk_write_bytes=self._writes.take_bytes())
        return taken

    def keep(self, device: PageDevice, pools: Sequence[PagePool]) -> None:
        """Writes the device's cached pages to disk, as many as there is time for; a second call does nothing."""
        if self._disk is None or self._writes is None or self._reads is None or self._closed:
            return
        self._closed = True
        deadline, count = time.monotonic() + CLOSE_SECONDS, 0
        self._settle()
        self._reads.close(0.0)
        self._writes.close(CLOSE_SECONDS)
        for group, pool in enumerate(pools):
            cached = [(page, key) for page, key in pool.cached_pages() if (group, key.digest) not in self._disk]
            cached = [(page, key) for page, key in cached if (group, page) not in self._restored]
            for at in range(0, len(cached), BATCH):
                if time.monotonic() > deadline:
                    logger.warning("%d pages of the KV cache are not kept: the disk is slow", len(cached) - at)
                    break
                some = cached[at : at + BATCH]
                contents = device.read_pages(group, [page for page, _ in some]).contents()
                for (_, key), content in zip(some, contents, strict=True):
                    count += bool(self._disk.write((group, key.digest), KeptPage(key.tokens, content)))
        if count:
            logger.info("%d pages of the KV cache are kept on disk for the next start", count)

    def _settle(self) -> None:
        """Keeps the pages that the device has read out; waits for the steps before them."""
        for reading in self._reading:
            for key, content in zip(reading.keys, reading.pages.contents(), strict=True):
                page = KeptPage(key.tokens, content)
                self._count(device_to_host_bytes=page.num_bytes)
                self._keep((reading.group, key.digest), page)
        self._reading.clear()

    def _keep(self, name: PageName, page: KeptPage) -> None:
        self._add(name, page)
        if self._disk is not None and self._writes is not None:
            written = partial(self._disk.write, name, page)
            if not self._writes.offer(written, page.num_bytes, limit=QUEUED_BYTES):
                self._count(disk_dropped_bytes=page.num_bytes)

    def _add(self, name: PageName, page: KeptPage) -> None:
        for gone in self._host.add(name, page):
            self._came_from.pop(gone, None)

    def _begin_fetches(self) -> None:
        while self._to_begin:
            fetch = self._to_begin[0]
            if self._fetched_bytes and self._fetched_bytes + fetch.num_bytes > self._most_bytes:
                return
            self._to_begin.popleft()
            self._fetched_bytes += fetch.num_bytes
            fetch.begun = True
            if fetch.transfer is not None:
                self._take_in_turn().add(partial(self._take, fetch))
            else:
                assert self._reads is not None
                self._reads.add(partial(self._read, fetch))

    def _read(self, fetch: _Fetch) -> None:
        """Runs on the reading thread."""
        assert self._disk is not None
        pages: dict[PageName, KeptPage] = {}
        for name in fetch.wanted:
            if fetch.given_up:
                break
            page = self._disk.read(name)
            if page is None:
                break  # what comes after it would be of no use
            pages[name] = page
        self._arrived.append((fetch, pages))
        self._arrival.set()

    def _take_in_turn(self) -> DiskThread:
        if len(self._takers) < TAKERS:
            self._takers.append(DiskThread("kv-take"))
        self._takers.rotate()
        return self._takers[0]

    def _take(self, fetch: _Fetch) -> None:
        """Runs on a taking thread; pages that come too late for their request are kept for later ones."""
        assert self._taker is not None and fetch.transfer is not None and fetch.transfer.take is not None
        pages: dict[PageName, KeptPage] = {}
        wanted = frozenset(fetch.wanted)
        try:
            for name, page in self._taker.take(fetch.transfer.take, peer=fetch.transfer.peer):
                if name in wanted:
                    pages[name] = page
                if fetch.given_up:
                    break
        except PagesLost as why:
            logger.warning("pages of another server are computed here: %s", why)
        self._arrived.append((fetch, pages))
        self._arrival.set()

    def _take_arrivals(self) -> None:
        self._arrival.clear()
        while self._arrived:
            fetch, found = self._arrived.popleft()
            fetch.done = True
            where = Place.DISK if fetch.transfer is None else Place.REMOTE
            for name, page in found.items() if fetch.cleared == self._cleared else ():
                self._count(**{f"{where.name.lower()}_read_bytes": page.num_bytes})
                if name not in self._host:
                    self._add(name, page)
                    self._came_from[name] = where

    def _count(self, **more: int) -> None:
        counts = self._counts
        self._counts = replace(counts, **{name: getattr(counts, name) + value for name, value in more.items()})
