"""What threads have found of a query's attention to some keys, and kernels of `Threads` that put it together: over the
warps of a program, and over the parts of a row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.cuda.flash import LEAST_TOTAL, LOG2_E, MASKED
from llmjax.kernels.cuda.threads import THREADS, WARPS, Threads, when

DIMS = 8  # of a share
AT_ONCE = 4  # parts that a warp merges at a time


@dataclass(frozen=True)
class Share:
    """What was found of 8 dims of a query head, for each thread; logits have base 2.

    Args:
        line: f32 quads, peak and total, twice.
        even, odd: f32 quads, sums of values, of dims 0, 2, 4, 6 and of dims 1, 3, 5, 7.
    """

    line: jax.Array
    even: jax.Array
    odd: jax.Array

    @property
    def quads(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.line, self.even, self.odd

    @classmethod
    def of(cls, threads: Threads, peak: jax.Array, total: jax.Array, even: jax.Array, odd: jax.Array) -> Share:
        """Peak and total are four equal numbers each."""
        return cls(threads.arranged([peak, total], [(0, 0), (1, 0), (0, 0), (1, 0)]), even, odd)

    @classmethod
    def together(cls, threads: Threads, shares: Sequence[Share]) -> Share:
        """The share of all keys that several shares have together."""
        peaks = [threads.spread(share.line, 0) for share in shares]
        peak = reduce(jnp.maximum, peaks)
        weights = [threads.exp2(each - peak) for each in peaks]
        line, even, odd = (
            sum((w * quads for w, quads in zip(weights[1:], each[1:], strict=True)), weights[0] * each[0])
            for each in zip(*(share.quads for share in shares), strict=True)
        )
        return cls.of(threads, peak, threads.spread(line, 1), even, odd)

    def words(self, threads: Threads, sink: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
        """The output, quads u32 of 8 dims, zeros where nothing was seen.

        Args:
            sink: f32 quads of four equal numbers, a logit of base e that has no value (`flash.Partial.divided`).
        """
        peak, total = (threads.spread(self.line, i) for i in (0, 1))
        if sink is None:
            factor = 1.0 / jnp.maximum(total, LEAST_TOTAL)
        else:
            logit = sink * LOG2_E
            higher = jnp.maximum(peak, logit)
            shrink = threads.exp2(peak - higher)
            factor = shrink / (total * shrink + threads.exp2(logit - higher))
        return threads.pairs(self.even * factor, self.odd * factor, dtype)


def shared_size(shares: int) -> int:
    """Numbers of shared memory that `of_all_warps` needs for a thread's number of shares."""
    return shares * 3 * THREADS * 4


def of_all_warps(
    threads: Threads, shared: Any, thread: jax.Array, shares: Sequence[Share]
) -> Iterator[tuple[jax.Array, Share]]:
    """Shares of the same place in all warps as one, dealt out among the warps: which of them each has, and it."""
    lane, warp = thread & 31, thread >> 5
    for (number, share), i in itertools.product(enumerate(shares), range(3)):
        threads.store(shared, ((number * 3 + i) * THREADS + thread) * 4, share.quads[i])
    threads.wait()
    for first in range(0, len(shares), WARPS):
        number = jnp.minimum(first + warp, len(shares) - 1)
        at = (number * (3 * THREADS) + lane) * 4
        of_warps = [
            Share(*(threads.load(shared, at, (i * THREADS + 32 * other) * 4) for i in range(3)))
            for other in range(WARPS)
        ]
        yield number, Share.together(threads, of_warps)


@dataclass(frozen=True)
class Parts:
    """Shares of parts of rows, in memory.

    Args:
        heads: H.
    """

    threads: Threads
    heads: int
    head_dim: int
    lines: Any  # reference, f32 [parts * H * 4]
    sums: Any  # reference, f32 [parts * H * h], of each 8 dims the even ones first

    def places(self, part: jax.Array, head: jax.Array, dim: jax.Array) -> tuple[jax.Array, jax.Array]:
        line = part * self.heads + head
        return line * 4, line * self.head_dim + dim

    def store(self, part: jax.Array, head: jax.Array, dim: jax.Array, share: Share) -> None:
        line, sums = self.places(part, head, dim)
        self.threads.store(self.lines, line, share.line)
        self.threads.store(self.sums, sums, share.even)
        self.threads.store(self.sums, sums + 4, share.odd)

    def load(self, part: jax.Array, head: jax.Array, dim: jax.Array) -> Share:
        line, sums = self.places(part, head, dim)
        quads = (self.threads.load(self.sums, sums, further) for further in (0, 4))
        return Share(self.threads.load(self.lines, line), *quads)


@dataclass(frozen=True)
class Merge:
    """Programs that merge the parts of rows: each has some heads of a row, whose parts its warps share."""

    threads: Threads
    heads: int
    head_dim: int
    dtype: jnp.dtype
    has_sinks: bool

    @property
    def chunks(self) -> int:
        """Programs of a row."""
        return -(-self.heads * self.head_dim // (32 * DIMS))

    def __call__(self, place: Sequence[jax.Array], lines: Any, sums: Any, rows: Any, *refs: Any) -> None:
        """lines, sums: of `Parts`; rows: i32 [R * 2], number of a row's first part, and how many are to be merged, or
        none; then sinks, f32 [H], where there are any; out: [R * H * h]."""
        sinks, (out, shared) = (refs[0], refs[1:]) if self.has_sinks else (None, refs)
        threads, row = self.threads, place[1]
        parts = Parts(threads, self.heads, self.head_dim, lines, sums)
        first, count = (rows[row * 2 + i] for i in range(2))

        @when(count > 0)
        def _() -> None:
            thread = threads.index()
            # Lanes after the last head repeat what is before it.
            at = jnp.minimum((place[0] * 32 + (thread & 31)) * DIMS, self.heads * self.head_dim - DIMS)
            head, dim = (f(at, np.int32(self.head_dim)) for f in (jax.lax.div, jax.lax.rem))

            def share_of(number: jax.Array) -> Share:
                share, there = parts.load(first + jnp.minimum(number, count - 1), head, dim), number < count
                peak, total = (threads.spread(share.line, i) for i in (0, 1))
                peak, total = jnp.where(there, peak, MASKED), jnp.where(there, total, 0.0)
                return Share.of(threads, peak, total, share.even, share.odd)

            def step(index: jax.Array, quads: Any) -> Any:
                number = index * (AT_ONCE * WARPS) + (thread >> 5)
                parts = [share_of(number + i * WARPS) for i in range(AT_ONCE)]
                return Share.together(threads, [Share(*quads), *parts]).quads

            zeros, masked = (threads.constant(value) for value in (0.0, MASKED))
            nothing = Share.of(threads, masked, zeros, zeros, zeros)
            steps = jax.lax.div(count + (AT_ONCE * WARPS - 1), np.int32(AT_ONCE * WARPS))
            share = Share(*jax.lax.fori_loop(0, steps, step, nothing.quads))
            for _, merged in of_all_warps(threads, shared, thread, [share]):
                sink = threads.look_up(sinks, head) if self.has_sinks else None
                threads.store(out, row * (self.heads * self.head_dim) + at, merged.words(threads, sink, self.dtype))
