"""Pages that had to leave the device, in host memory and on disk, and their way back.

The engine's thread plans moves while it plans a step, and makes them before it dispatches that step: what is evicted is
read out before it is overwritten, what comes back is written before it is read. It waits for the device only, and
for no longer than the step before takes; the disk has threads of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from llmjax.engine.core.page_pool import PageKey, PagePool
from llmjax.engine.core.stats import OffloadCounts
from llmjax.engine.tiers.disk import DiskPages
from llmjax.engine.tiers.disk_thread import CLOSE_SECONDS, DiskThread
from llmjax.engine.tiers.host import HostPages, KeptPage, PageContent, PageName

logger = logging.getLogger(__name__)

DISK, REMOTE, HOST = "disk", "remote", "host"  # where pages come from
TAKERS = 4  # threads that take pages from other servers
QUEUED_BYTES = 256 * 2**20  # of pages that wait to be written to disk; what comes then is not
FETCH_SECONDS = 10.0  # that a request waits for pages from disk; then they are computed
BATCH = 16  # pages that are read out at once when the engine ends


class Contents(Protocol):
    """Pages that are being read out."""

    def contents(self) -> list[PageContent]: ...


class PageDevice(Protocol):
    """Where pages come from and go to."""

    def read_pages(self, group: int, pages: Sequence[int]) -> Contents:
        """Starts to read what pages hold when all that was dispatched before has run."""

    def write_pages(self, group: int, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        """Gives pages other content, before all that is dispatched after."""


class PagesLost(Exception):
    """Pages do not come from another server."""


class Source(Protocol):
    """Where a fetch gets its pages."""

    def __call__(self) -> Iterator[tuple[PageName, KeptPage]]:
        """Pages as they come, perhaps others beside those that are wanted; raises PagesLost."""


@dataclass(eq=False)
class Fetch:
    """Pages that a request waits for.

    Attributes:
        names: of pages on disk and in host memory, none of which goes from there meanwhile.
        wanted: those on disk, or at another server.
        num_bytes: of all of them.
        done: all that can be had are there.
        begun: they are being read.
        given_up: nobody wants them any more.
    """

    names: list[PageName]
    wanted: list[PageName]
    num_bytes: int
    deadline: float
    cleared: int  # times that everything had been forgotten before
    source: Source | None = None  # another server; None: the disk
    done: bool = False
    begun: bool = False
    given_up: bool = False


@dataclass(frozen=True)
class _Reading:
    """Pages that the device reads out."""

    group: int
    keys: list[PageKey]
    pages: Contents


class Offload:
    """What has left the device.

    Args:
        host: pages in memory.
        disk: pages in files; None: there are none.
        page_bytes: of a page, by group.
    """

    def __init__(self, host: HostPages, disk: DiskPages | None, *, page_bytes: Sequence[int]) -> None:
        self._host = host
        self._disk = disk
        self.page_bytes = page_bytes
        self._evicted: dict[PageName, tuple[int, PageKey]] = {}  # since the last moves
        self._restored: dict[tuple[int, int], tuple[PageKey, KeptPage]] = {}  # since then, by group and page
        self._reading: list[_Reading] = []
        self._fetches: deque[Fetch] = deque()  # not begun
        self._fetched_bytes = 0  # of those that have begun and are in use
        self._came_from: dict[PageName, str] = {}  # of those in host memory that have not been used since
        self._cleared = 0  # times that everything was forgotten
        self._closed = False
        self._counts = OffloadCounts()
        self._writes = DiskThread("kv-to-disk") if disk is not None else None
        self._reads = DiskThread("kv-from-disk") if disk is not None else None
        self._takers: deque[DiskThread] = deque()
        self._arrived: deque[tuple[Fetch, dict[PageName, KeptPage]]] = deque()
        self._arrival = threading.Event()

    @property
    def has_disk(self) -> bool:
        """Whether pages may be on disk alone."""
        return self._disk is not None

    @property
    def host_bytes(self) -> int:
        """In host memory."""
        return self._host.num_bytes

    @property
    def disk_bytes(self) -> int:
        """On disk, as far as is known."""
        return 0 if self._disk is None else self._disk.num_bytes

    def watch(self, pools: Sequence[PagePool]) -> None:
        """Takes in what they evict; they are the groups' in order."""
        for group, pool in enumerate(pools):
            pool.watchers.append(_Evictions(self, group))

    def evicted(self, group: int, page: int, key: PageKey) -> None:
        """A page is given to somebody else."""
        name = (group, key.digest)
        if (restored := self._restored.pop((group, page), None)) is not None:
            self._keep(name, restored[1])  # it has not even come back
        elif self._host.find(group, key) is not None:
            self._host.use(name)
        else:
            self._evicted[name] = (page, key)

    def find(self, group: int, key: PageKey, *, on_disk: bool = False) -> bool:
        """Whether a page can be restored now; or might be after a fetch."""
        if self._host.find(group, key) is not None:
            return True
        return on_disk and self._disk is not None and (group, key.digest) in self._disk

    def restore(self, group: int, key: PageKey, page: int) -> str:
        """Has a page that was found written to a page of the device.

        Returns:
            Where it was: DISK or REMOTE if it has come from there for this, else HOST.
        """
        kept, name = self._host.find(group, key), (group, key.digest)
        assert kept is not None
        self._host.use(name)
        self._restored[group, page] = (key, kept)
        return self._came_from.pop(name, HOST)

    def count_hits(self, tokens: Mapping[str, int]) -> None:
        """Adds prompt tokens whose pages were found, by where they were."""
        self._count(**{f"{where}_hits": count for where, count in tokens.items()})

    def forget(self, group: int, key: PageKey) -> None:
        """What a page holds cannot be relied on."""
        name = (group, key.digest)
        self._evicted.pop(name, None)
        self._settle()
        self._host.remove(name)
        self._came_from.pop(name, None)
        if self._disk is not None and self._writes is not None:
            self._writes.add(partial(self._disk.remove, name))

    def drop_moves(self) -> None:
        """What the device holds is not what it was when moves were planned; what it has read out before is taken in."""
        self._settle()
        self._evicted.clear()
        self._restored.clear()

    def clear(self) -> None:
        """Nothing of what was kept is found any more."""
        self.drop_moves()
        self._host.clear()
        self._came_from.clear()
        self._cleared += 1
        if self._disk is not None and self._writes is not None:
            self._disk.forget_all()
            self._writes.add(self._disk.remove_all)

    def begin_plan(self) -> None:
        """A step is planned: what the moves before have brought is there."""
        self._settle()
        self._take_arrivals()
        self._begin_fetches()

    def move(self, device: PageDevice) -> None:
        """Makes the moves that were planned, before the step that was planned with them is dispatched."""
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

    def fetch(self, names: Sequence[PageName], source: Source | None = None) -> Fetch | None:
        """Starts to bring pages from disk to host memory, or from another server.

        Args:
            names: of all that are to be restored together.
            source: of another server's.

        Returns:
            What to wait for; None: all of them are in host memory.
        """
        wanted = [name for name in names if name not in self._host]
        if not wanted:
            return None
        size = sum(self.page_bytes[group] for group, _ in names)
        fetch = Fetch(list(names), wanted, size, time.monotonic() + FETCH_SECONDS, self._cleared, source)
        self._host.pin(names)
        self._fetches.append(fetch)
        self._begin_fetches()
        return fetch

    @property
    def most_fetched(self) -> int:
        """Bytes that may be fetched together."""
        return self._host.limit // 2

    def end_fetch(self, fetch: Fetch) -> None:
        """Its request has got what it was for, or does not want it any more."""
        if fetch.given_up:
            return
        fetch.given_up = True
        self._host.unpin(fetch.names)
        if fetch.begun:
            self._fetched_bytes -= fetch.num_bytes
        else:
            self._fetches.remove(fetch)

    def arrived(self, fetch: Fetch, *, seconds: float = 0.0) -> bool:
        """Whether a fetch is over, one way or the other.

        Args:
            seconds: to wait for any fetch.
        """
        if seconds and not fetch.done and not self._arrived:
            self._arrival.wait(seconds)
        self._take_arrivals()
        self._begin_fetches()
        return fetch.done or time.monotonic() > fetch.deadline

    def take_counts(self) -> OffloadCounts:
        """All since the last time."""
        taken, self._counts = self._counts, OffloadCounts()
        if self._writes is not None:
            taken = replace(taken, disk_write_bytes=self._writes.take_bytes())
        return taken

    def close(self, device: PageDevice, pools: Sequence[PagePool]) -> None:
        """Brings what the device still has cached to disk, as much as there is time for."""
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
        """Takes in what the device has read out; waits for the steps before it."""
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
        while self._fetches:
            fetch = self._fetches[0]
            if self._fetched_bytes and self._fetched_bytes + fetch.num_bytes > self.most_fetched:
                return
            self._fetches.popleft()
            self._fetched_bytes += fetch.num_bytes
            fetch.begun = True
            if fetch.source is not None:
                self._take_in_turn().add(partial(self._take, fetch))
            else:
                assert self._reads is not None
                self._reads.add(partial(self._read, fetch))

    def _read(self, fetch: Fetch) -> None:
        """On the reading thread."""
        assert self._disk is not None
        found: dict[PageName, KeptPage] = {}
        for name in fetch.wanted:
            if fetch.given_up:
                break
            page = self._disk.read(name)
            if page is None:
                break  # what comes after it would be of no use
            found[name] = page
        self._arrived.append((fetch, found))
        self._arrival.set()

    def _take_in_turn(self) -> DiskThread:
        if len(self._takers) < TAKERS:
            self._takers.append(DiskThread("kv-take"))
        self._takers.rotate()
        return self._takers[0]

    def _take(self, fetch: Fetch) -> None:
        """On a thread that takes: what comes too late for its request is of use to later ones."""
        assert fetch.source is not None
        found: dict[PageName, KeptPage] = {}
        wanted = frozenset(fetch.wanted)
        try:
            for name, page in fetch.source():
                if name in wanted:
                    found[name] = page
                if fetch.given_up:
                    break
        except PagesLost as why:
            logger.warning("pages of another server are computed here: %s", why)
        self._arrived.append((fetch, found))
        self._arrival.set()

    def _take_arrivals(self) -> None:
        self._arrival.clear()
        while self._arrived:
            fetch, found = self._arrived.popleft()
            fetch.done = True
            where = DISK if fetch.source is None else REMOTE
            for name, page in found.items() if fetch.cleared == self._cleared else ():
                self._count(**{f"{where}_read_bytes": page.num_bytes})
                if name not in self._host:
                    self._add(name, page)
                    self._came_from[name] = where

    def _count(self, **more: int) -> None:
        counts = self._counts
        self._counts = replace(counts, **{name: getattr(counts, name) + value for name, value in more.items()})


class _Evictions:
    """Tells of a group's pool."""

    def __init__(self, offload: Offload, group: int) -> None:
        self._offload = offload
        self._group = group

    def evicted(self, page: int, key: PageKey) -> None:
        self._offload.evicted(self._group, page, key)

    def forgotten(self, key: PageKey) -> None:
        """Kept pages are forgotten by name, wherever they are."""
