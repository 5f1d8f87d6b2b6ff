"""Times attention of one decoded token with pages of several types, on a model's own heads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention import KVPages, RaggedBatch, attend
from llmjax.models import Attention
from llmjax.models.config import ModelConfig
from llmjax.models.layers.state import PagedKV
from llmjax.platforms import Platform

COPIES = 4  # layers with pages of their own, so that they are not read from the nearest cache
RUNS = 15


def seconds_of_attention(
    model: ModelConfig, platform: Platform, types: Mapping[str, jnp.dtype], *, tokens: int, page_size: int
) -> dict[str, float]:
    """The least time of several runs, in turns, of the attention in all layers of a step with one token.

    Args:
        types: types of the KV cache by name.
        tokens: tokens before it; layers with a window see no more than that.

    Returns:
        Seconds by name; nothing, where layers keep something else than keys and values.
    """
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)]
    if not mixers or any(state is not None and not isinstance(state, PagedKV) for state in model.states):
        return {}
    found = dict.fromkeys(types, 0.0)
    kinds: dict[tuple[int, int, int, int], int] = {}
    for mixer in mixers:
        window = mixer.state.window or tokens
        kind = (mixer.heads, mixer.kv_heads, mixer.head_dim, min(tokens, window))
        kinds[kind] = kinds.get(kind, 0) + 1
    for (heads, kv_heads, head_dim, seen), layers in kinds.items():
        runs = {
            name: _run(
                PagedKV(kv_heads=kv_heads, head_dim=head_dim), heads, dtype, platform, tokens=seen, page_size=page_size
            )
            for name, dtype in types.items()
        }
        for name, seconds in _least(runs).items():
            found[name] += layers * seconds / COPIES
    return found


def _least(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    least = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()  # which compiles
    for _ in range(RUNS):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            least[name] = min(least[name], time.perf_counter() - began)
    return least


def _run(
    kept: PagedKV, heads: int, dtype: jnp.dtype, platform: Platform, *, tokens: int, page_size: int
) -> Callable[[], object]:
    """A call of attention in COPIES layers."""
    pages = -(-tokens // page_size)
    table = 1 + np.arange(pages, dtype=np.int32)[None]
    last = tokens - 1
    batch = RaggedBatch(
        query_start=jnp.arange(2, dtype=jnp.int32),
        kv_len=jnp.full(1, tokens, jnp.int32),
        page_table=jnp.asarray(table),
        kv_index=jnp.asarray(table[:, last // page_size] * page_size + last % page_size),
        decode=True,
    )
    rng = np.random.default_rng(0)
    x = platform.activation_dtype
    q = jnp.asarray(rng.standard_normal((1, heads, kept.head_dim)), x)
    k = jnp.asarray(rng.standard_normal((1, kept.kv_heads, kept.head_dim)), x)
    held = [
        kept.make(num_pages=pages + 1, page_size=page_size, dtype=dtype, as_bits=platform.is_cpu) for _ in range(COPIES)
    ]
    call = run_of_layers(attend, q, k, held, batch, scale=kept.head_dim**-0.5)
    return lambda: jax.block_until_ready(call())


def run_of_layers(
    attention: Callable[..., Any],
    q: jax.Array,
    k: jax.Array,
    layers: list[KVPages],
    batch: RaggedBatch,
    *,
    scale: float,
) -> Callable[[], Any]:
    """A call of attention in several layers, in one program that stores keys, which are values too, in their pages.

    Args:
        attention: what `attend` is.
        q, k: queries [T, H, h] of the first layer, and keys [T, K, h] of all.
        layers: pages of each, which are given away.

    Returns:
        A function that returns the output of the last layer and all pages.
    """

    def in_all(
        q: jax.Array, k: jax.Array, layers: list[KVPages], batch: RaggedBatch
    ) -> tuple[jax.Array, list[KVPages]]:
        stored = []
        for layer in layers:
            q, layer = attention(q, k, k, layer, batch, scale=scale)
            stored.append(layer)
        return q, stored

    program = jax.jit(in_all, donate_argnums=2)

    def run() -> tuple[jax.Array, list[KVPages]]:
        nonlocal layers
        out, layers = program(q, k, layers, batch)
        return out, layers

    return run
