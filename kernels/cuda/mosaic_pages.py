"""Keys and values out of pages as factors of products of tensor cores, in registers of the threads that read them.

A product does not care in which order its depth is, if both factors have the same. So a thread has 16 bytes of each
key, as they lie in memory, which are depths of the product with queries and outputs of the product with weights; keys
that are a pair there are brought side by side by shifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention.types import KVLayout
from llmjax.kernels.cuda.threads import Threads

LOW, HIGH, HALF = np.uint32(0xFFFF), np.uint32(0xFFFF0000), np.uint32(16)


class Numbers(Protocol):
    """What numbers in pages become: factors, u32 quads of two 16-bit floats each."""

    @property
    def width(self) -> int:
        """Numbers of a thread, 16 bytes."""

    def queries(self, quads: Sequence[jax.Array]) -> list[jax.Array]:
        """A thread's numbers of a query as factors for `keys`: each has two pairs of low and high depths."""

    def keys(self, quads: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        """A thread's numbers of four keys as factors, low and high depths for 16 of them each."""

    def values(self, quads: Sequence[jax.Array], masks: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """A thread's numbers of eight keys as factors: of each of several tiles of four dims, keys i and i + 4.

        Args:
            masks: u32 quads of four equal numbers, for each i: what remains of the words.
        """

    def dims(self, tiles: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        """Sums of tiles, f32 quads, in their order: of each eight dims, the even and the odd ones."""


def side_by_side(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The low halves of two words as one, and the high halves."""
    return a & LOW | b << HALF, a >> HALF | b & HIGH


@dataclass(frozen=True)
class Halves:
    """16-bit floats, which are multiplied as they are."""

    threads: Threads
    width: int = 8

    def queries(self, quads: Sequence[jax.Array]) -> list[jax.Array]:
        return list(quads)

    def keys(self, quads: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        a, b, c, d = self.threads.turned(quads)
        return [(a, b), (c, d)]

    def values(self, quads: Sequence[jax.Array], masks: Sequence[jax.Array]) -> list[list[jax.Array]]:
        pairs = [side_by_side(quads[i], quads[i + 4]) for i in range(4)]
        return [[pair[parity] & mask for pair, mask in zip(pairs, masks, strict=True)] for parity in (0, 1)]

    def dims(self, tiles: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        even, odd = tiles
        return [(even, odd)]


@dataclass(frozen=True)
class Codes:
    """int8, which becomes bf16, exactly; scales multiply logits and weights. Bytes 0 and 2 of a word become a pair, and
    bytes 1 and 3."""

    threads: Threads
    width: int = 16

    def queries(self, quads: Sequence[jax.Array]) -> list[jax.Array]:
        first, second = (self.threads.arranged(quads, [(0, i), (0, i + 2), (1, i), (1, i + 2)]) for i in (0, 1))
        even, odd = side_by_side(first, second)
        return [self.threads.arranged([even, odd], [(0, i), (1, i), (0, i + 1), (1, i + 1)]) for i in (0, 2)]

    def keys(self, quads: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        return [self._floats(words) for words in self.threads.turned(quads)]

    def values(self, quads: Sequence[jax.Array], masks: Sequence[jax.Array]) -> list[list[jax.Array]]:
        floats = [self._floats(words) for words in quads]
        tiles: list[list[jax.Array]] = [[], [], [], []]  # dims 0, 1, 2 and 3 of each word
        for i in range(4):
            for odd in (0, 1):
                pair = side_by_side(floats[i][odd], floats[i + 4][odd])
                tiles[odd].append(pair[0])
                tiles[odd + 2].append(pair[1])
        return tiles

    def dims(self, tiles: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        def eight(a: jax.Array, b: jax.Array, first: int) -> jax.Array:
            return self.threads.arranged([a, b], [(0, first), (1, first), (0, first + 1), (1, first + 1)])

        return [(eight(tiles[0], tiles[2], i), eight(tiles[1], tiles[3], i)) for i in (0, 2)]

    def _floats(self, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The seven low bits as mantissas, and by the highest -128 or -256."""
        halves = []
        for shifted in (words, words >> np.uint32(8)):
            low, high = shifted & np.uint32(0x7F007F) | np.uint32(0x43004300), shifted & np.uint32(0x800080)
            halves.append(self.threads.add(low, high | np.uint32(0xC300C300)))
        even, odd = halves
        return even, odd


@dataclass(frozen=True)
class Layout:
    """How pages lie in memory."""

    pages: KVLayout
    kv_heads: int
    head_dim: int
    table_width: int

    @property
    def record(self) -> int:
        """Numbers of a page of a head, keys or values."""
        return self.pages.rows(self.head_dim) * self.head_dim

    @property
    def page(self) -> int:
        """Numbers of a page."""
        return self.pages.parts * self.kv_heads * self.record


@dataclass(frozen=True)
class Pages:
    """Keys and values of some tokens of a row, for a key/value head."""

    threads: Threads
    layout: Layout
    data: Any  # reference, [N * parts * K * rows * h]
    table: Any  # reference, i32 [R * P]
    first: jax.Array  # i32, the layer's first page
    row: jax.Array  # i32
    head: jax.Array  # i32
    last: jax.Array  # i32, the last token that is seen, whose page is read in place of those after it

    def look_up(self, key: jax.Array) -> jax.Array:
        """The page of a token, i32 quads."""
        page = jax.lax.div(jnp.minimum(key, self.last), np.int32(self.layout.pages.page_size))
        return self.threads.look_up(self.table, self.row * self.layout.table_width + page) + self.first

    def read(
        self, part: int, page: jax.Array, key: jax.Array, dim: jax.Array, *, count: int, step: int
    ) -> list[jax.Array]:
        """16 bytes of tokens, quads u32: from ``dim`` on and then every ``step`` dims, of ``count`` tokens from
        ``key`` on, which are on one page."""
        head_dim = self.layout.head_dim
        at = self._start(part) + self._offset(key) * head_dim + dim
        return [
            self.threads.load(self.data, at, i * head_dim + further, block=page, of=self.layout.page)
            for further in range(0, head_dim, step)
            for i in range(count)
        ]

    def scales(self, part: int, page: jax.Array, key: jax.Array) -> jax.Array:
        """Scales of four tokens from ``key`` on, f32 quads."""
        at = self._start(part) + self.layout.pages.page_size * self.layout.head_dim + 4 * self._offset(key)
        words = self.threads.load(self.data, at, block=page, of=self.layout.page)
        return jax.lax.bitcast_convert_type(words, jnp.float32)

    def _start(self, part: int) -> jax.Array:
        return (part * self.layout.kv_heads + self.head) * self.layout.record

    def _offset(self, key: jax.Array) -> jax.Array:
        return jax.lax.rem(key, np.int32(self.layout.pages.page_size))
