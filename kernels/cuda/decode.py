"""Attention of rows with one query: the keys of a row divided among programs, and what they find merged.

Flash decoding (Dao et al. 2023): one program for each row and key/value head would leave most of a card idle, so the
visible keys of a row are split. The query heads of a key/value head are the rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention.types import KVPages, RaggedBatch
from llmjax.kernels.cuda.flash import Keys, Partial, Queries, QueryRules, attend
from llmjax.kernels.cuda.lowering import MIN_DOT, Launch, launch, load, power_of_2, program_id, store
from llmjax.kernels.cuda.pages import MAX_HEAD_DIM, PageReader, PageRefs, first_page
from llmjax.kernels.cuda.tuned import Key, tuned

ENOUGH_PROGRAMS = 512
MAX_SPLITS = 32
MAX_HEADS = 64  # that a program takes


@dataclass(frozen=True)
class Split:
    """How the keys of a row are divided.

    Args:
        parts: programs that share them; a power of two.
        heads: query heads of a key/value head that a program takes; a power of two.
        keys: that it reads at a time; it takes a multiple of them.
        warps: of a program.
        stages: of its loop.
    """

    parts: int
    heads: int
    keys: int
    warps: int = 4
    stages: int = 2

    @classmethod
    def of(cls, rows: int, group: int, pages: KVPages, table_width: int, reader: PageReader) -> Split:
        """For so many rows, query heads a key/value head, and pages a row."""
        wide = reader.padded_dim > MAX_HEAD_DIM
        heads = min(2 * MIN_DOT if wide else MAX_HEADS, max(MIN_DOT, power_of_2(group)))
        useful = -(-table_width * pages.page_size // reader.block)
        enough = ENOUGH_PROGRAMS // 4 if wide else ENOUGH_PROGRAMS  # larger ones, and more to merge from each
        wanted = -(-enough // (rows * pages.data.shape[2] * -(-group // heads)))
        parts = min(MAX_SPLITS, power_of_2(useful), power_of_2(wanted))
        return cls(parts, heads, reader.block, warps=8 if wide else 4)

    @staticmethod
    def key(q: jax.Array, pages: KVPages, reader: PageReader) -> Key:
        """What the table of a card knows it by; how long requests may get says little about how long they are."""
        return Key.of("decode", reader.name, *q.shape[:2], pages.data.shape[2])


def decode(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    sinks: jax.Array | None,
    *,
    rules: QueryRules,
    split: Split | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of one query a row, at position ``kv_len - 1``.

    Args:
        q: [R, H, h].
        batch: the rows; the output of those whose ``kv_len`` is 0 is 0. Which tokens they bring does not matter.
        sinks: f32 [H] or None.
        split: how to divide the work; None: as was measured, or `Split.of` says.

    Returns:
        [R, H, size of a value] in q's dtype.
    """
    rows, heads, _ = q.shape
    kv_heads = pages.data.shape[2]
    reader, group = PageReader.of(pages, q), heads // kv_heads
    if split is None:
        by_arithmetic = Split.of(rows, group, pages, batch.page_table.shape[1], reader)
        split = tuned(by_arithmetic, Split.key(q, pages, reader))
    kernel = _Kernel(reader, rules, split, group, sinks is not None)
    calibration = q if pages.calibration is None else pages.calibration  # what is not there is not read
    parts = (rows, heads, split.parts)
    found = launch(
        kernel.decode,
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (parts, parts, (*parts, reader.value_dim))],
        [q, pages.data, batch.page_table, first_page(batch), calibration, batch.kv_len],
        Launch((split.parts, kv_heads * -(-group // split.heads), rows), split.warps, split.stages, interpret),
    )
    (out,) = launch(
        kernel.merge,
        [jax.ShapeDtypeStruct((rows, heads, reader.value_dim), q.dtype)],
        [*found, q if sinks is None else sinks.astype(jnp.float32)],
        Launch((rows, heads), warps=split.warps, interpret=interpret),
    )
    return out


@dataclass(frozen=True)
class _Kernel:
    reader: PageReader
    rules: QueryRules
    split: Split
    group: int
    has_sinks: bool

    def decode(
        self,
        q: Any,
        data: Any,
        table: Any,
        first_page: Any,
        calibration: Any,
        kv_len: Any,
        peaks: Any,
        totals: Any,
        sums: Any,
    ) -> None:
        """What one part of a row's keys gives. peaks, totals: f32 [R, H, parts]; sums: f32 [R, H, parts, value]."""
        reader, split = self.reader, self.split
        part, block, row = (program_id(axis) for axis in range(3))
        blocks_of_head = np.int32(-(-self.group // split.heads))
        head = jax.lax.div(block, blocks_of_head)
        length = load(kv_len, (row,))
        first = self.rules.first_key(length - 1)
        blocks = jax.lax.div(length - first + (split.keys - 1), np.int32(split.keys))
        each = jax.lax.div(blocks + (split.parts - 1), np.int32(split.parts)) * split.keys
        start = first + part * each
        keys = Keys(start, jnp.minimum(start + each, length), split.keys)

        within = jax.lax.rem(block, blocks_of_head) * split.heads + jnp.arange(split.heads, dtype=jnp.int32)
        inside = within < self.group
        heads = head * self.group + within
        columns = reader.columns()
        values = [
            load(q, (row, heads[:, None], column.index[None]), inside[:, None] & column.inside[None])
            for column in columns
        ]
        position = jnp.zeros_like(within) + (length - 1)
        queries = Queries(tuple(v.astype(reader.dtype) for v in values), position, row, head)
        partial = attend(queries, keys, PageRefs(data, table, first_page, calibration), reader, self.rules)
        store(peaks, (row, heads, part), partial.peak, inside)
        store(totals, (row, heads, part), partial.total, inside)
        where = inside[:, None] & columns[0].inside[None]
        store(sums, (row, heads[:, None], part, columns[0].index[None]), partial.acc, where)

    def merge(self, peaks: Any, totals: Any, sums: Any, sinks: Any, out: Any) -> None:
        """All parts of one head. out: [R, H, value]."""
        row, head = program_id(0), program_id(1)
        part, columns = jnp.arange(self.split.parts, dtype=jnp.int32), self.reader.columns()[0]
        column, inside = columns.index, columns.inside
        found = load(peaks, (row, head, part))
        peak = found.max(0)
        weight = jnp.exp2(found - peak)
        total = (load(totals, (row, head, part)) * weight).sum(0)
        acc = (load(sums, (row, head, part[:, None], column[None]), inside[None]) * weight[:, None]).sum(0)
        one = jnp.zeros(1, jnp.float32)
        sink = load(sinks, (head,)) + one if self.has_sinks else None
        merged = Partial(peak + one, total + one, acc[None]).divided(sink)
        store(out, (row, head, column), merged.reshape(column.shape).astype(out.dtype), inside)
