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

from kernels.attention.types import KVPages, RaggedBatch
from kernels.cuda.flash import Keys, Queries, Rules, attend
from kernels.cuda.lowering import MIN_DOT, Launch, launch, load, power_of_2, program_id, store
from kernels.cuda.pages import PageReader, PageRefs


@dataclass(frozen=True)
class Blocks:
    """How queries are divided.

    Args:
        tokens: of a row that a program takes.
        heads: query heads of a key/value head, filled up to a power of two.
        keys: that it reads at a time.
        warps: of a program.
    """

    tokens: int
    heads: int
    keys: int
    warps: int

    @classmethod
    def of(cls, tokens: int, group: int, reader: PageReader) -> Blocks:
        """For so many tokens and query heads a key/value head."""
        heads = power_of_2(group)
        most = 32 if reader.exact else 64 if reader.padded_dim > 128 else 128
        rows = max(heads, min(most, max(MIN_DOT, power_of_2(tokens) * heads)))
        # Ampere keeps keys in registers, and one-byte types must become floats there.
        keys = min(reader.block, 32) if reader.layout.dtype.itemsize == 1 else reader.block
        return cls(tokens=rows // heads, heads=heads, keys=keys, warps=8 if rows > 64 or reader.padded_dim > 128 else 4)


def prefill(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    count: jax.Array,
    sinks: jax.Array | None,
    *,
    rules: Rules,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of the rows' last ``count`` tokens.

    Args:
        q: [T, H, h].
        count: i32 [R], queries of each row; rows with 0 are left out.
        sinks: f32 [H] or None.
        blocks: how to divide the work; None: as `Blocks.of` says.

    Returns:
        [T, H, h]; undefined for tokens of no row with queries.
    """
    tokens, heads, _ = q.shape
    kv_heads = pages.data.shape[2]
    reader = PageReader.of(pages, q)
    blocks = blocks or Blocks.of(tokens, heads // kv_heads, reader)
    ends = jnp.cumsum((count + (blocks.tokens - 1)) // blocks.tokens)  # programs up to and with row r
    programs = tokens // blocks.tokens + min(len(count), tokens)
    program = jnp.arange(programs, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, program, side="right", method="compare_all"), len(count) - 1).astype(
        jnp.int32
    )
    first = (program - (ends - (count + (blocks.tokens - 1)) // blocks.tokens)[row]) * blocks.tokens

    kernel = _Kernel(reader, rules, blocks, heads // kv_heads, sinks is not None)
    arguments = [
        q,
        pages.data,
        batch.page_table,
        q if pages.calibration is None else pages.calibration,  # what is not there is not read
        q if sinks is None else sinks.astype(jnp.float32),
        jnp.stack([row, first], 1),
        jnp.stack([batch.query_start[:-1], count, batch.kv_len - count], 1),
    ]
    how = Launch((kv_heads, programs), warps=blocks.warps, interpret=interpret)
    (out,) = launch(kernel.prefill, [jax.ShapeDtypeStruct(q.shape, q.dtype)], arguments, how)
    return out


@dataclass(frozen=True)
class _Kernel:
    reader: PageReader
    rules: Rules
    blocks: Blocks
    group: int
    has_sinks: bool

    def prefill(
        self, q: Any, data: Any, table: Any, calibration: Any, sinks: Any, work: Any, rows: Any, out: Any
    ) -> None:
        """work: i32 [programs, 2], row and first query; rows: i32 [R, 3], first token, queries, tokens before them."""
        reader, blocks = self.reader, self.blocks
        head, program = program_id(0), program_id(1)
        row, first = (load(work, (program, np.int32(i))) for i in range(2))
        start, count, before = (load(rows, (row, np.int32(i))) for i in range(3))

        lane = jnp.arange(blocks.tokens * blocks.heads, dtype=jnp.int32)
        query = first + jax.lax.div(lane, np.int32(blocks.heads))
        within = jax.lax.rem(lane, np.int32(blocks.heads))
        inside = (query < count) & (within < self.group)
        column = reader.column()
        place = ((start + query)[:, None], (head * self.group + within)[:, None], column[None])
        where = inside[:, None] & (column < reader.head_dim)[None]
        queries = Queries(load(q, place, where).astype(reader.dtype), before + query, row, head)
        last = jnp.minimum(first + blocks.tokens, count)
        stop = jnp.where(first < count, before + last, 0)  # a program without work has no keys
        keys = Keys(self.rules.first_key(before + first), stop, blocks.keys)
        partial = attend(queries, keys, PageRefs(data, table, calibration), reader, self.rules)
        sink = load(sinks, (head * self.group + within,), within < self.group) if self.has_sinks else None
        store(out, place, partial.divided(sink).astype(out.dtype), where)
