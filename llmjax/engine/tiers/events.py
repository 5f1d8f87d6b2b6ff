"""KV events: the pages that the device's prefix cache gets and loses, as messages in vLLM's format (``kv_events.py``):
MessagePack, a batch as an array, each event as a map."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from llmjax.engine.core.listener import CacheListener
from llmjax.engine.core.page_pool import PageKey
from llmjax.engine.core.request import EngineRequest
from llmjax.engine.loading.memory import KVPlan
from llmjax.models.config import ModelConfig
from llmjax.models.layers.state import AllTokens, LastTokens, LatentKV, Span

DEVICE = "GPU"  # the medium, whatever the device is
HASH_BYTES = 8  # the last ones of a digest


class CacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """One event; the name of its class is its ``type``."""


class BlockStored(CacheEvent):
    """Consecutive pages that can be found now."""

    block_hashes: list[int]
    parent_block_hash: int | None  # hash of the page before them; None: they are the first ones of a text
    token_ids: list[int]  # the tokens of all of them
    block_size: int  # tokens
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None  # for each page, what its hash is made of besides tokens
    group_idx: int | None = None  # number of the group of layers
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(CacheEvent):
    """Pages that can no longer be found."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(CacheEvent):
    """The event that no page can be found any more."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of a step."""

    ts: float  # seconds since 1970
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Publisher(Protocol):
    """Sends messages to other programs."""

    rank: int  # the engine's rank

    def publish(self, message: EventBatch) -> None:
        """Sends a message; never waits."""

    def close(self) -> None:
        """Sends what waits and ends it."""


class CacheEvents(CacheListener):
    """Writes down which pages can be found, group by group, and publishes it.

    Args:
        publisher: sends the events.
        spans: the spans of the groups of layers.
        latent: whether the pages of all tokens hold latent vectors.
        page_size: tokens per page.
    """

    def __init__(self, publisher: Publisher, spans: Sequence[Span], *, latent: bool, page_size: int) -> None:
        self._publisher = publisher
        self._kinds = [_kind(span, latent=latent) for span in spans]
        self._windows = [span.window if isinstance(span, LastTokens) else None for span in spans]
        self._page_size = page_size
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []

    @classmethod
    def of(cls, publisher: Publisher, plan: KVPlan, model: ModelConfig) -> CacheEvents:
        """The events of a model's groups of layers."""
        latent = any(isinstance(state, LatentKV) for state in model.states)
        return cls(publisher, [group.span for group in plan.groups], latent=latent, page_size=plan.page_size)

    def stored(self, group: int, key: PageKey, *, parent: bytes | None, request: EngineRequest) -> None:
        adaptation = request.adaptation
        digest, before = block_hash(key.digest), None if parent is None else block_hash(parent)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.group_idx == group and last.block_hashes[-1] == before:
            last.block_hashes.append(digest)
            last.token_ids += key.tokens
            if last.extra_keys is not None:
                last.extra_keys.append(_extra_keys(request, first=False))
            return
        self._events.append(
            BlockStored(
                block_hashes=[digest],
                parent_block_hash=before,
                token_ids=list(key.tokens),
                block_size=self._page_size,
                lora_id=None if adaptation is None else adaptation.parts[0].reference.number,
                medium=DEVICE,
                lora_name=None if adaptation is None else adaptation.name,
                extra_keys=None if (extra := _extra_keys(request, first=parent is None)) is None else [extra],
                group_idx=group,
                kv_cache_spec_kind=self._kinds[group],
                kv_cache_spec_sliding_window=self._windows[group],
            )
        )

    def removed(self, group: int, key: PageKey) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(block_hash(key.digest))
        else:
            self._events.append(BlockRemoved([block_hash(key.digest)], DEVICE, group))

    def cleared(self) -> None:
        self._events = [AllBlocksCleared()]  # nothing that happened before matters

    def publish(self) -> None:
        if events := self.take():
            self._publisher.publish(EventBatch(time.time(), events, self._publisher.rank))

    def take(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """The events since the last call, in order."""
        taken, self._events = self._events, []
        return taken

    def close(self) -> None:
        self._publisher.close()


def _extra_keys(request: EngineRequest, *, first: bool) -> tuple[str, ...] | None:
    """What a page's hash is made of besides tokens. A word before the digest of adapters tells it from a salt.

    Args:
        first: whether it is the first page of a text.
    """
    adapters = [] if request.adaptation is None else [f"lora:{request.adaptation.digest}"]
    salts = [request.cache_salt] if request.cache_salt and first else []
    return (*adapters, *salts) or None


def block_hash(digest: bytes) -> int:
    """The last 64 bits of a digest, as vLLM shortens its digests in events."""
    return int.from_bytes(digest[-HASH_BYTES:], "big")


def _kind(span: Span, *, latent: bool) -> str:
    """vLLM's name of a kind of layers."""
    if isinstance(span, LastTokens):
        return "sliding_window"
    if isinstance(span, AllTokens):
        return "mla_attention" if latent else "full_attention"
    return "mamba"
