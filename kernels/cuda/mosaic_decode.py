"""Attention of rows with one query by Mosaic GPU, in fragments of tensor cores: the kernels of `decode.py` that do not
need Triton, for every card since Ampere.

Keys are the left factor of their product with queries, and values of theirs with weights, so that query heads are
columns, 8 at a time, and a key/value head that few of them share wastes little. Both are read once, from their pages
into registers, 16 bytes of a thread at a time (`mosaic_pages.py`). Weights alone move between threads, 8 x 8 at an
instruction. Keys of the next run are on their way while a warp multiplies the values of one, and values while it
multiplies keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention.types import KVPages, RaggedBatch
from llmjax.kernels.cuda.flash import MASKED, QueryRules
from llmjax.kernels.cuda.mosaic_merge import DIMS, Merge, Parts, Share, of_all_warps, shared_size
from llmjax.kernels.cuda.mosaic_pages import Codes, Halves, Layout, Numbers, Pages
from llmjax.kernels.cuda.pages import first_page
from llmjax.kernels.cuda.split import IDLE, WHOLE
from llmjax.kernels.cuda.split import Parts as Work
from llmjax.kernels.cuda.threads import WARPS, Threads, launch, refuses_card, when

RUN = 32  # keys that a warp takes at a time
COLUMNS = 8  # query heads, that a product of tensor cores takes
MOST_TILES = 2  # of them, that a program takes: with their sums, keys and values fill the registers
HEAD_DIMS = (64, 128)  # registers hold no more
FLOATS = (jnp.bfloat16, jnp.float16)
LANES_OF_KEYS = (4, 8, 16)  # bits of a lane's number that say which keys it has


def refuses(q: jax.Array, pages: KVPages) -> str | None:
    """Why the kernels do not take these; None: they do."""
    head_dim = q.shape[2]
    if pages.layout.value_dim is not None:
        return "pages are latent"
    if pages.layout.token_scales and pages.dtype == jnp.int8:
        if q.dtype != jnp.bfloat16:
            return f"queries are {q.dtype}, pages int8"
        if head_dim != HEAD_DIMS[-1]:
            return f"the head size {head_dim} of int8 pages is not {HEAD_DIMS[-1]}"
    elif q.dtype not in FLOATS or pages.data.dtype != q.dtype:
        return f"queries are {q.dtype}, pages {pages.dtype}"
    if head_dim not in HEAD_DIMS:
        return f"the head size {head_dim} is neither of {HEAD_DIMS}"
    if pages.page_size % DIMS:
        return f"pages of {pages.page_size} tokens"
    return refuses_card()


def decode(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    sinks: jax.Array | None,
    work: Work,
    *,
    rules: QueryRules,
    heads: int,
    interpret: bool = False,
) -> jax.Array:
    """`llmjax.kernels.cuda.decode.decode`, as far as `refuses` allows.

    Args:
        work: which keys each program has.
        heads: query heads of a key/value head that a program takes at most.
        interpret: run the kernels as XLA operations, on any device.
    """
    rows, num_heads, head_dim = q.shape
    kv_heads = pages.data.shape[2]
    group = num_heads // kv_heads
    threads = Threads(interpret)
    attend = _Attend(
        threads=threads,
        rules=rules,
        layout=Layout(pages.layout, kv_heads, head_dim, batch.page_table.shape[1]),
        group=group,
        tiles=max(1, min(MOST_TILES, -(-min(heads, group) // COLUMNS))),
        dtype=q.dtype,
        has_sinks=sinks is not None,
    )
    given_sinks = [] if sinks is None else [sinks.astype(jnp.float32)]
    most = max(1, work.most)
    out, lines, sums = launch(
        "decode",
        attend,
        (
            jax.ShapeDtypeStruct((q.size,), q.dtype),
            jax.ShapeDtypeStruct((most * num_heads * 4,), jnp.float32),
            jax.ShapeDtypeStruct((most * num_heads * head_dim,), jnp.float32),
        ),
        [
            q.reshape(-1),
            pages.data.reshape(-1),
            batch.page_table.reshape(-1),
            first_page(batch),
            work.programs.reshape(-1),
            *given_sinks,
        ],
        grid=(kv_heads * attend.blocks, len(work.programs), 1),
        shared=attend.shared,
        interpret=interpret,
    )
    if work.most:  # a row may have more than a block
        merge = Merge(threads, num_heads, head_dim, q.dtype, sinks is not None)
        out = launch(
            "merge",
            merge,
            jax.ShapeDtypeStruct(out.shape, out.dtype),
            [lines, sums, work.rows.reshape(-1), *given_sinks],
            grid=(merge.chunks, rows, 1),
            shared=shared_size(1),
            in_place=out,
            interpret=interpret,
        )
    return out.reshape(q.shape)


@dataclass(frozen=True)
class _Keys:
    """The keys of a program, in runs from ``first`` on, a multiple of 8: it sees those from ``start`` to before
    ``stop``."""

    first: jax.Array
    start: jax.Array
    stop: jax.Array

    @classmethod
    def of(cls, start: jax.Array, stop: jax.Array) -> _Keys:
        return cls(start & -DIMS, start, stop)

    @property
    def rounds(self) -> jax.Array:
        """In which each warp has a run of keys."""
        return jax.lax.div(jnp.maximum(self.stop - self.first, 0) + (WARPS * RUN - 1), np.int32(WARPS * RUN))

    def visible(self, key: jax.Array) -> jax.Array:
        return (key >= self.start) & (key < self.stop)


@dataclass(frozen=True)
class _Place:
    """Where a thread is: in its warp, it is lane ``4 * g + c``."""

    thread: jax.Array  # i32 quads, as all are

    @property
    def warp(self) -> jax.Array:
        return self.thread >> 5

    @property
    def g(self) -> jax.Array:
        return (self.thread & 31) >> 2

    @property
    def c(self) -> jax.Array:
        return self.thread & 3


@dataclass(frozen=True)
class _Heads:
    """The query heads of a program."""

    first: jax.Array  # i32, of the key/value head
    block: jax.Array  # i32, which columns of those that share the key/value head
    group: int

    def of(self, column: jax.Array) -> jax.Array:
        """The query head of a column; columns after the last repeat it, since several threads write to one place."""
        return self.first + jnp.minimum(self.block + column, self.group - 1)


@dataclass(frozen=True)
class _Attend:
    """The programs that read keys and values.

    Of a run, the product with queries has keys ``4 * g + i`` of thread ``4 * g + c`` in its rows, and its columns
    ``2 * c`` and ``2 * c + 1`` of each tile; the product with weights has keys ``8 * c`` to ``8 * c + 7`` of the thread
    in its depth, and the same columns.
    """

    threads: Threads
    rules: QueryRules
    layout: Layout
    group: int  # query heads of a key/value head
    tiles: int  # of 8 of them, that a program takes
    dtype: jnp.dtype
    has_sinks: bool

    @property
    def blocks(self) -> int:
        """Programs that share the query heads of a key/value head."""
        return -(-self.group // (COLUMNS * self.tiles))

    @property
    def num_heads(self) -> int:
        return self.layout.kv_heads * self.group

    @property
    def columns(self) -> int:
        """Columns of a thread."""
        return 2 * self.tiles

    @property
    def numbers(self) -> Numbers:
        return Codes(self.threads) if self.layout.pages.token_scales else Halves(self.threads)

    @property
    def num_shares(self) -> int:
        """Shares of a thread: it has those dims of a value that one of 8 lanes reads."""
        return self.layout.head_dim // (8 * DIMS) * self.columns

    @property
    def shared(self) -> int:
        return shared_size(self.num_shares)

    def __call__(
        self, place: Sequence[jax.Array], q: Any, data: Any, table: Any, first: Any, programs: Any, *refs: Any
    ) -> None:
        """q: [R * H * h]; data: of pages; table: i32 [R * P]; first: i32 [1]; programs: i32 [programs * 4], as
        `split.Parts` has them; then sinks, f32 [H], where there are any; out: [R * H * h]; lines, sums: of
        `mosaic_merge.Parts`."""
        row, start, stop, part = (programs[place[1] * 4 + i] for i in range(4))

        @when(part != IDLE)
        def _() -> None:
            head, block = (f(place[0], np.int32(self.blocks)) for f in (jax.lax.div, jax.lax.rem))
            pages = Pages(self.threads, self.layout, data, table, first[0], row, head, jnp.maximum(stop - 1, 0))
            heads = _Heads(head * self.group, block * (COLUMNS * self.tiles), self.group)
            self._run(q, pages, refs, _Keys.of(start, stop), part, heads)

    def _run(self, q: Any, pages: Pages, refs: Any, keys: _Keys, part: jax.Array, heads: _Heads) -> None:
        threads, numbers, place = self.threads, self.numbers, _Place(self.threads.index())
        queries = [self._queries(q, pages.row, heads.of(COLUMNS * tile + place.g), place) for tile in range(self.tiles)]
        number = threads.number()

        def first_key(index: Any) -> jax.Array:
            return keys.first + (index * WARPS + place.warp) * RUN

        def page_of_keys(index: Any) -> jax.Array:
            return pages.look_up(first_key(index) + 4 * place.g)

        def page_of_values(index: Any) -> jax.Array:
            return pages.look_up(first_key(index) + 8 * place.c)

        def fetch(index: Any, page: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            """Keys, and the scales of keys and values."""
            key, width = first_key(index) + 4 * place.g, numbers.width
            scales = [pages.scales(part, page, key) for part in range(2 * self.layout.pages.token_scales)]
            return pages.read(0, page, key, width * place.c, count=4, step=4 * width), scales

        def step(index: jax.Array, state: Any) -> Any:
            (k, scales), keys_page, values_page, peak, totals, sums = state
            run, width = first_key(index), numbers.width
            v = pages.read(1, values_page, run + 8 * place.c, width * place.g, count=8, step=8 * width)
            products = self._key_products(k, queries)
            ahead = (fetch(index + 1, keys_page), page_of_keys(index + 2), page_of_values(index + 1))

            visible = keys.visible(run + 4 * place.g + number)
            logits = [self.rules.cap(each * scales[0] if scales else each) for each in products]
            logits = [jnp.where(visible, each, MASKED) for each in logits]
            higher = jnp.maximum(peak, threads.reduced(logits, "max", LANES_OF_KEYS))
            shrink = threads.exp2(peak - higher)
            shrinks = [threads.spread(shrink, i) for i in range(self.columns)]
            weights = [
                jnp.where(visible, threads.exp2(each - threads.spread(higher, i)), 0.0) for i, each in enumerate(logits)
            ]
            totals = [total * each + weight for total, each, weight in zip(totals, shrinks, weights, strict=True)]
            sums = [each * shrinks[i % self.columns] for i, each in enumerate(sums)]
            if scales:
                weights = [jnp.where(visible, weight * scales[1], 0.0) for weight in weights]
            masks = self._masks(keys, run + 8 * place.c + number)
            return *ahead, higher, totals, self._value_products(sums, v, weights, masks)

        zeros = threads.constant(0.0)
        state = (
            fetch(0, page_of_keys(0)),
            page_of_keys(1),
            page_of_values(0),
            threads.constant(MASKED),
            [zeros] * self.columns,
            [zeros] * (2 * self.num_shares),
        )
        *_, peak, totals, sums = jax.lax.fori_loop(0, keys.rounds, step, state)
        self._write(refs, self._shares(peak, totals, sums), pages.row, part, heads, place)

    def _queries(self, q: Any, row: jax.Array, head: jax.Array, place: _Place) -> list[jax.Array]:
        """Factors for all depths of keys, of a tile."""
        width, head_dim = self.numbers.width, self.layout.head_dim
        at = (row * self.num_heads + head) * head_dim + width * place.c
        return [
            factor
            for first in range(0, head_dim, 4 * width)
            for factor in self.numbers.queries([self.threads.load(q, at, first + i) for i in range(0, width, 8)])
        ]

    def _key_products(self, k: list[jax.Array], queries: list[list[jax.Array]]) -> list[jax.Array]:
        """Products of four keys of each thread with each of its columns, f32 quads.

        Args:
            k: four keys, for all depths.
            queries: factors of each tile, from `_queries`.
        """
        threads = self.threads
        products: list[jax.Array] = []
        depths = [pair for i in range(0, len(k), 4) for pair in self.numbers.keys(k[i : i + 4])]
        for tile in queries:
            sums: Sequence[jax.Array] = [threads.constant(0.0)] * 2
            for i, (low, high) in enumerate(depths):
                sums = threads.multiply(sums, low, high, tile[i // 2], i % 2, self.dtype)
            products += sums
        return products

    def _value_products(
        self, sums: list[jax.Array], v: list[jax.Array], weights: list[jax.Array], masks: list[jax.Array]
    ) -> list[jax.Array]:
        """Sums with those of a run added.

        Args:
            sums: f32 quads, of each four dims that `Numbers.values` has, of each column.
            v: eight keys, for all dims.
            weights: f32 quads, four keys, of each column.
            masks: from `_masks`.
        """
        threads, totals = self.threads, list(sums)
        # Transposed, weights have keys i and i + 4 of a thread's eight side by side.
        factors = [
            threads.transposed(threads.pairs(weights[i], weights[i + 1], self.dtype)) for i in range(0, self.columns, 2)
        ]
        dims = [words for i in range(0, len(v), 8) for words in self.numbers.values(v[i : i + 8], masks)]
        for (number, words), (tile, factor) in itertools.product(enumerate(dims), enumerate(factors)):
            at = number * self.columns + 2 * tile
            for s in (0, 1):
                low, high = words[2 * s : 2 * s + 2]
                totals[at : at + 2] = threads.multiply(totals[at : at + 2], low, high, factor, s, self.dtype)
        return totals

    def _masks(self, keys: _Keys, key: jax.Array) -> list[jax.Array]:
        """Masks for words of two values, those of each of four keys and of the key four further: floats that nobody
        sees may be NaN, which no weight of zero makes harmless."""
        low, high = (
            jnp.where(keys.visible(k), np.uint32(bits), np.uint32(0))
            for k, bits in ((key, 0xFFFF), (key + 4, 0xFFFF0000))
        )
        return [self.threads.spread(low | high, i) for i in range(4)]

    def _shares(self, peak: jax.Array, totals: list[jax.Array], sums: list[jax.Array]) -> list[Share]:
        """The share of each 8 dims of a thread and each column."""
        threads, total = self.threads, self.threads.reduced(totals, "sum", LANES_OF_KEYS)
        tiles = self.numbers.width // 4
        each = tiles * self.columns  # sums that are read as one
        by_column = [
            [self.numbers.dims(sums[first + column : first + each : self.columns]) for column in range(self.columns)]
            for first in range(0, len(sums), each)
        ]
        return [
            Share.of(threads, threads.spread(peak, i), threads.spread(total, i), *of_columns[i][eight])
            for of_columns in by_column
            for eight in range(tiles // 2)
            for i in range(self.columns)
        ]

    def _write(
        self, refs: Any, shares: list[Share], row: jax.Array, part: jax.Array, heads: _Heads, place: _Place
    ) -> None:
        sinks, (out, lines, sums, shared) = (refs[0], refs[1:]) if self.has_sinks else (None, refs)
        threads, width, head_dim = self.threads, self.numbers.width, self.layout.head_dim
        parts = Parts(threads, self.num_heads, head_dim, lines, sums)
        for number, share in of_all_warps(threads, shared, place.thread, shares):
            column, eight = number & (self.columns - 1), number >> (self.columns.bit_length() - 1)
            head = heads.of(COLUMNS * (column >> 1) + 2 * place.c + (column & 1))
            block, within = (f(eight, np.int32(width // DIMS)) for f in (jax.lax.div, jax.lax.rem))
            dim = (8 * block + place.g) * width + DIMS * within

            @when(part == WHOLE)
            def _(share: Share = share, head: jax.Array = head, dim: jax.Array = dim) -> None:
                sink = threads.look_up(sinks, head) if self.has_sinks else None
                at = (row * self.num_heads + head) * head_dim + dim
                threads.store(out, at, share.words(threads, sink, self.dtype))

            @when(part >= 0)
            def _(share: Share = share, head: jax.Array = head, dim: jax.Array = dim) -> None:
                parts.store(part, head, dim, share)
