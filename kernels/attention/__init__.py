"""Ragged paged attention: every token of a step attends to the pages of its own request.

``attend`` stores the step's new K and V and returns the attention output, as one operation so that an implementation
may fuse the two.
"""

from __future__ import annotations

from typing import Any

import jax

from llmjax.kernels.attention import portable
from llmjax.kernels.attention.types import KVLayout, KVPages, RaggedBatch, make_pages
from llmjax.kernels.cpu import attention as cpu
from llmjax.kernels.cpu.library import library
from llmjax.kernels.registry import Implementation, Operation, later

CUDA = "llmjax.kernels.cuda.attention"  # Pallas is a tenth of what a start would import

__all__ = ["ATTENTION", "KVLayout", "KVPages", "RaggedBatch", "attend", "make_pages"]


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
) -> tuple[jax.Array, KVPages]:
    """Writes K and V of the step's tokens, then attends.

    Args:
        q: [T, H, h], rope applied.
        k, v: [T, K, h]; K divides H, query head i reads key/value head ``i // (H / K)``. Latent pages (see `KVLayout`)
            have no v: the value is the first ``value_dim`` elements of the key.
        pages: the layer's pages, rewritten in place when donated.
        window: how many keys a query sees, its own included; None: all before it.
        causal: False: a query sees the keys after it too, as many as before it, so a row's tokens must all be in the
            step, or none that follow those that are.
        softcap: ``softcap * tanh(logits / softcap)`` before the mask.
        sinks: f32 [H], an extra logit of each head's softmax.
        slopes: f32 [H], what a logit loses a token that the key lies before the query, after softcap (ALiBi, Press et
            al. 2021, arXiv:2108.12409).

    Returns:
        Output [T, H, size of a value] in q's dtype (padding tokens: undefined, finite) and the pages.
    """
    attended: tuple[jax.Array, KVPages] = ATTENTION(
        q, k, v, pages, batch, sinks, slopes, scale=scale, window=window, causal=causal, softcap=softcap
    )
    return attended


def _native(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pages: KVPages,
    batch: RaggedBatch,
    sinks: jax.Array | None = None,
    slopes: None = None,
    **rules: Any,
) -> tuple[jax.Array, KVPages]:
    return cpu.attend(q, k, v, pages, batch, sinks, **rules)


def _native_refuses(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pages: KVPages,
    batch: RaggedBatch | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    **_: Any,
) -> str | None:
    if slopes is not None:
        return "logits have a bias by distance"
    if batch is not None and not batch.sees_all:
        return "tokens see others than those before them"
    return cpu.refuses(q, pages) or (None if library() is not None else "not built")


# Positional: q, k, v, pages, batch, sinks, slopes. Static: scale, window, causal, softcap.
ATTENTION = Operation(
    "attention",
    (
        Implementation("C++", _native, platform="cpu", refuses=_native_refuses),
        Implementation("Pallas", later(CUDA, "attend"), platform="cuda", refuses=later(CUDA, "refuses")),
        Implementation("XLA", portable.attend),
    ),
)
