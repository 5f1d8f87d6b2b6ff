"""The interface to receivers of the prefix cache's changes: which pages the device gets and loses."""

from __future__ import annotations

from abc import ABC, abstractmethod

from llmjax.engine.core.page_pool import PageKey
from llmjax.engine.core.request import EngineRequest


class CacheListener(ABC):
    """Receives every change of the prefix cache: pages that can be found, and those that no longer can."""

    @abstractmethod
    def stored(self, group: int, key: PageKey, *, parent: bytes | None, request: EngineRequest) -> None:
        """Notes that a page can be found.

        Args:
            group: the number of its group of layers.
            key: names the page's content.
            parent: digest of the page before it; None: it is the first one of a text.
            request: the request that it was computed for; only those with its salt and its adapters share it.
        """

    @abstractmethod
    def removed(self, group: int, key: PageKey) -> None:
        """Notes that a page can no longer be found."""

    @abstractmethod
    def cleared(self) -> None:
        """Notes that no page can be found any more."""

    @abstractmethod
    def publish(self) -> None:
        """Passes on what has happened since the last call."""

    @abstractmethod
    def close(self) -> None:
        """Passes on nothing any more; a second call does nothing."""


class NoListener(CacheListener):
    """Ignores all changes."""

    def stored(self, group: int, key: PageKey, *, parent: bytes | None, request: EngineRequest) -> None:
        return

    def removed(self, group: int, key: PageKey) -> None:
        return

    def cleared(self) -> None:
        return

    def publish(self) -> None:
        return

    def close(self) -> None:
        return
