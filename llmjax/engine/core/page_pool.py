"""The page pool of one KV group: the pages' holders, the prefixes that they cache, and which to give out next."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmjax.errors import LLMJaxError

DUMMY_PAGE = 0  # absorbs padding; never given out
DIGEST_BYTES = 16


@dataclass(frozen=True)
class PageKey:
    """Names the content of a full page: everything before it (chained digest) and its own tokens."""

    digest: bytes
    tokens: tuple[int, ...]

    @staticmethod
    def root(kind: str, name: str = "") -> bytes:
        """The parent of first pages: no two kinds or names have the same, and no page's digest is one.

        Args:
            kind: what shares pages, such as "salt"; at most 9 letters.
            name: which of that kind; any string, lone surrogates too.
        """
        return hashlib.blake2b(
            name.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES, person=f"llmjax {kind}".encode()
        ).digest()

    @staticmethod
    def shared(salt: str | None, adapters: str | None, kind: str = "") -> bytes:
        """The parent of first pages that requests share which have the same of all of these.

        Args:
            salt: cache salt of the request, if it has one.
            adapters: digest of its adapters, if it has any.
            kind: further things that have to be equal.
        """
        root = PageKey.root("salt", kind + salt) if salt else PageKey.root("all", kind)
        return root if adapters is None else PageKey.marked(root, f"adapters {adapters}".encode())

    @staticmethod
    def marked(parent: bytes, marks: bytes) -> bytes:
        """The parent of a page that has something beside its tokens, told by ``marks``; empty: it has nothing."""
        if not marks:
            return parent
        return hashlib.blake2b(parent + marks, digest_size=DIGEST_BYTES, person=b"llmjax marked").digest()

    @staticmethod
    def chain(parent: bytes, tokens: Sequence[int]) -> PageKey:
        """The key of the page that follows the one with digest ``parent`` (or a root) and holds ``tokens``."""
        token_ids = tuple(tokens)
        # In one call, because a prompt may have thousands of pages.
        content = parent + struct.pack(f"<{len(token_ids)}I", *token_ids)
        digest = hashlib.blake2b(content, digest_size=DIGEST_BYTES, person=b"llmjax page")
        return PageKey(digest.digest(), token_ids)


class PoolWatcher:
    """Receives which content the pool forgets, except in `PagePool.forget_all`. This base class ignores it."""

    def evicted(self, page: int, key: PageKey) -> None:
        """Notes that a page gets a new holder. Its content stays until the next step runs."""

    def forgotten(self, key: PageKey) -> None:
        """Notes that a content is not worth caching, or cannot be relied on."""


class PagePool:
    """Reference-counted pages with a prefix cache.

    A page is *used* (held by at least one request), *cached* (not held, content known, evicted oldest first) or
    *free*. ``free + cached + used == total`` at any time.

    Args:
        num_pages: pages on the device, the dummy page included.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise LLMJaxError(f"a KV group needs at least 2 pages, not {num_pages}; give the KV cache more memory")
        self.total = num_pages - 1
        self._free = deque(range(1, num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._holders = [0] * num_pages
        self._used = 0  # pages with a holder
        self._keys: list[PageKey | None] = [None] * num_pages
        self._pages: dict[bytes, int] = {}  # digest -> page
        self.watcher = PoolWatcher()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self._used

    @property
    def available(self) -> int:
        """Pages that ``allocate`` can give out."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages with one holder each; None, and no change, if fewer are available."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.popleft()
            else:
                page, _ = self._cached.popitem(last=False)
                if (key := self._forget(page)) is not None:
                    self.watcher.evicted(page, key)
            self._holders[page] = 1
            pages.append(page)
        self._used += count
        return pages

    def holders(self, page: int) -> int:
        """Requests that hold the page; 0 for the dummy page."""
        return self._holders[page]

    def find(self, key: PageKey) -> int | None:
        """The page with this content, if one is known."""
        page = self._pages.get(key.digest)
        if page is None or self._keys[page] != key:
            return None
        return page

    def hold(self, page: int) -> None:
        """Adds a holder to a page that is used or cached."""
        if self._holders[page] == 0:
            del self._cached[page]
            self._used += 1
        self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Removes a holder from each page; the first ones released are evicted first."""
        for page in pages:
            if page == DUMMY_PAGE:
                continue
            self._holders[page] -= 1
            if self._holders[page] < 0:
                raise LLMJaxError(f"page {page} was released more often than held")
            if self._holders[page] == 0:
                self._used -= 1
                if self._keys[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def commit(self, page: int, key: PageKey) -> bool:
        """Registers the content of a held, full page; returns whether it is new.

        If another page already holds this content, that page stays the one that is found.
        """
        if self._keys[page] is not None or key.digest in self._pages:
            return False
        self._keys[page] = key
        self._pages[key.digest] = page
        return True

    def forget(self, page: int) -> None:
        """Removes the content of a used or cached page from the prefix cache."""
        if (key := self._forget(page)) is not None:
            self.watcher.forgotten(key)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def forget_all(self) -> None:
        """Empties the prefix cache; held pages stay with their holders."""
        while self._cached:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
            self._free.append(page)
        for page, key in enumerate(self._keys):
            if key is not None:
                self._forget(page)

    def cached_pages(self) -> list[tuple[int, PageKey]]:
        """The cached pages and what they hold, the most recently used one first."""
        pages = [(page, self._keys[page]) for page in reversed(self._cached)]
        return [(page, key) for page, key in pages if key is not None]

    def check(self) -> None:
        """Raises if a page is lost or counted twice (for tests and the idle engine)."""
        held = sum(holders > 0 for holders in self._holders)
        if held != self.used or self.free + self.cached + held != self.total:
            raise LLMJaxError(f"pages leaked: {self.free} free + {self.cached} cached + {held} used != {self.total}")

    def _forget(self, page: int) -> PageKey | None:
        key = self._keys[page]
        if key is not None:
            del self._pages[key.digest]
            self._keys[page] = None
        return key
