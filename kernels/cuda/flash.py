"""Attention of one tile of queries to a run of keys, block by block, with an online softmax.

Flash attention (Dao et al. 2022, arXiv:2205.14135). The queries of a tile are tokens and heads that share a key/value
head, so that keys are read once for all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from llmjax.kernels.cuda.lowering import dot
from llmjax.kernels.cuda.pages import PageReader, PageRefs

MASKED = -1e30  # finite, so that a query that sees no key yields zeros and not NaN
LEAST_TOTAL = 1e-30
LOG2_E = math.log2(math.e)  # powers of two are what the hardware has


@dataclass(frozen=True)
class QueryRules:
    """What every query obeys (contract: ``llmjax.kernels.attention.attend``)."""

    scale: float
    window: int | None
    softcap: float | None

    def cap(self, logits: jax.Array) -> jax.Array:
        """Products of queries and keys as logits of base 2."""
        if self.softcap is None:
            return logits * (self.scale * LOG2_E)
        return jnp.tanh(logits * (self.scale / self.softcap)) * (self.softcap * LOG2_E)

    def first_key(self, position: jax.Array) -> jax.Array:
        """The first key that a query sees."""
        return jnp.zeros_like(position) if self.window is None else jnp.maximum(position - (self.window - 1), 0)


@dataclass(frozen=True)
class Queries:
    """A tile of queries of a request."""

    values: tuple[jax.Array, ...]  # [M, D] for each of `PageReader.columns`, in the type of the products
    position: jax.Array  # i32 [M]
    row: jax.Array  # i32, in the page table
    head: jax.Array  # i32, key/value head


@dataclass(frozen=True)
class Keys:
    """A run of keys: those from ``first`` to before ``stop``, ``block`` at a time."""

    first: jax.Array
    stop: jax.Array
    block: int


@dataclass(frozen=True)
class Partial:
    """Softmax over some keys, not divided yet; logits have base 2."""

    peak: jax.Array  # f32 [M]
    total: jax.Array  # f32 [M]
    acc: jax.Array  # f32 [M, D], D: of a value

    def divided(self, sinks: jax.Array | None) -> jax.Array:
        """The output, f32 [M, D]; zeros where nothing was seen.

        Args:
            sinks: f32 [M], logits (of base e) that take part in the softmax and have no value.
        """
        if sinks is None:
            return self.acc / jnp.maximum(self.total, LEAST_TOTAL)[:, None]
        peak = jnp.maximum(self.peak, sinks * LOG2_E)
        shrink = jnp.exp2(self.peak - peak)
        total = self.total * shrink + jnp.exp2(sinks * LOG2_E - peak)
        return self.acc * (shrink / total)[:, None]


def attend(queries: Queries, keys: Keys, refs: PageRefs, reader: PageReader, rules: QueryRules) -> Partial:
    """Softmax-weighted sums of the values whose keys the queries see."""
    key_zero, value_zero = reader.zeros(refs)
    bias = None
    if key_zero is not None:
        bias = (key_zero * sum(q.astype(jnp.float32).sum(1) for q in queries.values))[:, None]
    block = jnp.arange(keys.block, dtype=jnp.int32)

    def step(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, acc = state
        key = keys.first + index * keys.block + block
        inside = key < keys.stop
        k, v = reader.read(refs, queries.row, queries.head, key, inside)
        logits = sum(dot(q, codes, transpose_b=True) for q, codes in zip(queries.values, k.codes, strict=True))
        if k.scale is not None:
            logits = logits * k.scale[None]
        if bias is not None:
            logits = logits + bias
        visible = inside[None] & (key[None] <= queries.position[:, None])
        if rules.window is not None:
            visible &= key[None] > queries.position[:, None] - rules.window
        logits = jnp.where(visible, rules.cap(logits), MASKED)
        new_peak = jnp.maximum(peak, logits.max(1))
        weights = jnp.where(visible, jnp.exp2(logits - new_peak[:, None]), 0.0)
        shrink = jnp.exp2(peak - new_peak)
        total = total * shrink + weights.sum(1)
        weighted = weights if v.scale is None else weights * v.scale[None]
        acc = acc * shrink[:, None] + dot(weighted.astype(reader.dtype), v.codes[0])
        return new_peak, total, acc

    size = len(queries.position)
    peak = jnp.full(size, MASKED, jnp.float32)
    start = (peak, jnp.zeros(size, jnp.float32), jnp.zeros((size, reader.padded_dim), jnp.float32))
    blocks = jax.lax.div(jnp.maximum(keys.stop - keys.first, 0) + (keys.block - 1), jnp.int32(keys.block))
    peak, total, acc = jax.lax.fori_loop(0, blocks, step, start)
    return Partial(peak, total, acc if value_zero is None else acc + (total * value_zero)[:, None])
