"""Attention of rows with several queries: blocks of a row's queries against its pages.

A program takes some tokens of one row and the query heads that share a key/value head. Rows are ragged: which row and
which of its tokens a program has is worked out by XLA beforehand, for as many programs as the shapes may need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention.types import KVPages, RaggedBatch
from llmjax.kernels.cuda.flash import Keys, Queries, QueryRules, attend
from llmjax.kernels.cuda.lowering import MIN_DOT, Launch, launch, load, power_of_2, program_id, store
from llmjax.kernels.cuda.pages import MAX_HEAD_DIM, PageReader, PageRefs, first_page
from llmjax.kernels.cuda.ragged import Blocks
from llmjax.kernels.cuda.tuned import Key, little_shared_memory, tuned


@dataclass(frozen=True)
class Tiles:
    """How queries are divided.

    Args:
        tokens: tokens of a row that a program takes.
        heads: query heads of a key/value head that it takes; a power of two.
        keys: keys that it reads at a time.
        warps: warps of a program.
        stages: stages of its loop's software pipeline.
        mosaic: 1: `mosaic_prefill` does it, where it takes the arguments; the other numbers then mean nothing. On an
            H100 it is faster, except for few tokens after few others.
    """

    tokens: int
    heads: int
    keys: int
    warps: int
    stages: int = 2
    mosaic: int = 1

    @classmethod
    def of(cls, tokens: int, group: int, reader: PageReader) -> Tiles:
        """The division for ``tokens`` tokens and ``group`` query heads a key/value head."""
        most = 32 if reader.exact else 64 if reader.padded_dim > 128 else 128
        if reader.padded_dim > MAX_HEAD_DIM and little_shared_memory():
            most //= 2
        heads = min(most, power_of_2(group))
        rows = min(most, max(MIN_DOT, power_of_2(tokens) * heads))
        # Ampere keeps keys in registers, and one-byte types must become floats there.
        keys = min(reader.block, 32) if reader.layout.dtype.itemsize == 1 else reader.block
        return cls(tokens=rows // heads, heads=heads, keys=keys, warps=8 if rows > 64 or reader.padded_dim > 128 else 4)

    @staticmethod
    def key(q: jax.Array, pages: KVPages, reader: PageReader) -> Key:
        """What the table of a card knows it by."""
        return Key.of("prefill", reader.name, *q.shape[:2], pages.data.shape[2])


def prefill(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    count: jax.Array,
    sinks: jax.Array | None,
    *,
    rules: QueryRules,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of the rows' last ``count`` tokens.

    Args:
        q: [T, H, h].
        count: i32 [R], queries of each row; rows with 0 are left out.
        sinks: f32 [H] or None.
        tiles: how to divide the work; None: as was measured, or `Tiles.of` says.

    Returns:
        [T, H, size of a value]; undefined for tokens of no row with queries.
    """
    tokens, heads, _ = q.shape
    kv_heads = pages.data.shape[2]
    reader = PageReader.of(pages, q)
    group = heads // kv_heads
    if tiles is None:
        tiles = tuned(Tiles.of(tokens, group, reader), Tiles.key(q, pages, reader))
    if tiles.mosaic and not interpret:
        from llmjax.kernels.cuda import mosaic_prefill  # importing Mosaic GPU delays every start by a sixth of a second

        if not mosaic_prefill.refuses(q, pages, sinks):
            return mosaic_prefill.prefill(q, pages, batch, count, rules=rules)
    blocks = Blocks.of(count, size=tiles.tokens, most=tokens)
    kernel = _Kernel(reader, rules, tiles, group, sinks is not None)
    arguments = [
        q,
        pages.data,
        batch.page_table,
        first_page(batch),
        q if pages.calibration is None else pages.calibration,  # what is not there is not read
        q if sinks is None else sinks.astype(jnp.float32),
        jnp.stack([blocks.group, blocks.first], 1),
        jnp.stack([batch.query_start[:-1], count, batch.kv_len - count], 1),
    ]
    grid = (kv_heads * -(-group // tiles.heads), len(blocks.group))
    shape = jax.ShapeDtypeStruct((tokens, heads, reader.value_dim), q.dtype)
    (out,) = launch(kernel.prefill, [shape], arguments, Launch(grid, tiles.warps, tiles.stages, interpret))
    return out


@dataclass(frozen=True)
class _Kernel:
    reader: PageReader
    rules: QueryRules
    tiles: Tiles
    group: int
    has_sinks: bool

    def prefill(
        self,
        q: Any,
        data: Any,
        table: Any,
        first_page: Any,
        calibration: Any,
        sinks: Any,
        work: Any,
        rows: Any,
        out: Any,
    ) -> None:
        """work: i32 [programs, 2], row and first query; rows: i32 [R, 3], first token, queries, tokens before them."""
        reader, tiles = self.reader, self.tiles
        block, program = program_id(0), program_id(1)
        blocks_of_head = np.int32(-(-self.group // tiles.heads))
        head = jax.lax.div(block, blocks_of_head)
        row, first = (load(work, (program, np.int32(i))) for i in range(2))
        start, count, before = (load(rows, (row, np.int32(i))) for i in range(3))

        lane = jnp.arange(tiles.tokens * tiles.heads, dtype=jnp.int32)
        query = first + jax.lax.div(lane, np.int32(tiles.heads))
        within = jax.lax.rem(block, blocks_of_head) * tiles.heads + jax.lax.rem(lane, np.int32(tiles.heads))
        inside = (query < count) & (within < self.group)
        columns = reader.columns()
        place = ((start + query)[:, None], (head * self.group + within)[:, None])
        values = [
            load(q, (*place, column.index[None]), inside[:, None] & column.inside[None]).astype(reader.dtype)
            for column in columns
        ]
        queries = Queries(tuple(values), before + query, row, head)
        last = jnp.minimum(first + tiles.tokens, count)
        stop = jnp.where(first < count, before + last, 0)  # a program without work has no keys
        keys = Keys(self.rules.first_key(before + first), stop, tiles.keys)
        partial = attend(queries, keys, PageRefs(data, table, first_page, calibration), reader, self.rules)
        sink = load(sinks, (head * self.group + within,), within < self.group) if self.has_sinks else None
        where = inside[:, None] & columns[0].inside[None]
        store(out, (*place, columns[0].index[None]), partial.divided(sink).astype(out.dtype), where)
