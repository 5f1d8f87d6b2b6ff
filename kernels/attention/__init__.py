"""Ragged paged attention: every token of a step attends to the pages of its own request.

``attend`` stores the step's new K and V and returns the attention output, as one operation so that an implementation
may fuse the two.
"""

from __future__ import annotations

import jax

from kernels.attention.portable import ragged_paged_attention, write_kv
from kernels.attention.types import KVPages, RaggedBatch, make_pages
from kernels.cpu import attention as cpu
from kernels.cpu.library import library

__all__ = ["KVPages", "RaggedBatch", "attend", "make_pages"]


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, KVPages]:
    """Writes K and V of the step's tokens, then attends causally.

    Args:
        q: [T, H, h], rope applied.
        k, v: [T, K, h]; K divides H, query head i reads key/value head ``i // (H / K)``.
        pages: the layer's pages, rewritten in place when donated.
        window: how many keys a query sees, its own included; None: all before it.
        softcap: ``softcap * tanh(logits / softcap)`` before the mask.
        sinks: f32 [H], an extra logit of each head's softmax.

    Returns:
        Output [T, H, h] in q's dtype (padding tokens: undefined, finite) and the pages.
    """
    arguments = (q, k, v, pages, batch, sinks)

    def portable(
        q: jax.Array, k: jax.Array, v: jax.Array, pages: KVPages, batch: RaggedBatch, sinks: jax.Array | None
    ) -> tuple[jax.Array, KVPages]:
        pages = write_kv(pages, k, v, batch.slots)
        out = ragged_paged_attention(q, pages, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
        return out, pages

    if not cpu.supports(q, pages) or (native := library()) is None:
        return portable(*arguments)

    def on_cpu(
        q: jax.Array, k: jax.Array, v: jax.Array, pages: KVPages, batch: RaggedBatch, sinks: jax.Array | None
    ) -> tuple[jax.Array, KVPages]:
        return cpu.attend(
            q, k, v, pages, batch, library=native, scale=scale, window=window, softcap=softcap, sinks=sinks
        )

    return jax.lax.platform_dependent(*arguments, cpu=on_cpu, default=portable)
