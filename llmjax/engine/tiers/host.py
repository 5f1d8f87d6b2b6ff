"""The host tier: pages in the host's memory, up to a limit; the least recently used ones go first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np

from llmjax.engine.core.page_pool import PageKey
from llmjax.engine.core.tier import KeptPage, PageName


@dataclass(frozen=True)
class PageFormat:
    """A group's pages as bytes: the tokens as i32, then each array.

    Args:
        page_size: tokens.
        shapes: shapes and types of the arrays in a page.
    """

    page_size: int
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of a page."""
        return 4 * self.page_size + sum(shape.size * shape.dtype.itemsize for shape in self.shapes)

    def encode(self, page: KeptPage) -> bytes:
        """The page as bytes."""
        return b"".join([np.array(page.tokens, "<i4").tobytes(), *(array.tobytes() for array in page.content)])

    def decode(self, payload: bytes) -> KeptPage:
        """The page again; raises ValueError if it is not one of this format."""
        if len(payload) != self.num_bytes:
            raise ValueError("it holds another model's page")
        tokens = tuple(np.frombuffer(payload, "<i4", self.page_size).tolist())
        arrays, at = [], 4 * self.page_size
        for shape in self.shapes:
            arrays.append(np.frombuffer(payload, shape.dtype, shape.size, at).reshape(shape.shape))
            at += arrays[-1].nbytes
        return KeptPage(tokens, tuple(arrays))


class HostPages:
    """Pages by name.

    Args:
        limit: most bytes of all pages.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self._pages: OrderedDict[PageName, KeptPage] = OrderedDict()  # least recently used first
        self._pins: Counter[PageName] = Counter()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, name: PageName) -> bool:
        return name in self._pages

    def find(self, group: int, key: PageKey) -> KeptPage | None:
        """The page with this key; None: it is not here."""
        kept = self._pages.get((group, key.digest))
        return kept if kept is not None and kept.tokens == key.tokens else None

    def use(self, name: PageName) -> None:
        """Notes that a page that is here was used."""
        self._pages.move_to_end(name)

    def add(self, name: PageName, page: KeptPage) -> list[PageName]:
        """Keeps a page, unless it is larger than the limit or all others are pinned.

        Returns:
            The pages that were dropped for it.
        """
        gone: list[PageName] = []
        if name in self._pages:
            self.use(name)
            return gone
        self._pages[name] = page
        self.num_bytes += page.num_bytes
        if self.num_bytes > self.limit:
            for other in [other for other in self._pages if not self._pins[other]]:
                self.remove(other)
                gone.append(other)
                if self.num_bytes <= self.limit:
                    break
        return [other for other in gone if other != name]

    def pin(self, names: Iterable[PageName]) -> None:
        """Keeps pages until they are unpinned as often as they were pinned."""
        self._pins.update(names)

    def unpin(self, names: Iterable[PageName]) -> None:
        for name in names:
            self._pins[name] -= 1
            if not self._pins[name]:
                del self._pins[name]

    def remove(self, name: PageName) -> None:
        """Removes a page if it is there."""
        if (page := self._pages.pop(name, None)) is not None:
            self.num_bytes -= page.num_bytes

    def clear(self) -> None:
        self._pages.clear()
        self.num_bytes = 0
