"""Attention of rows with one query: all rows' keys are dealt out among programs (`split.py`), and what they find is
merged. The query heads of a key/value head are the rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention.types import KVPages, RaggedBatch
from llmjax.kernels.cuda import mosaic_decode
from llmjax.kernels.cuda.flash import MASKED, Keys, Partial, Queries, QueryRules, attend
from llmjax.kernels.cuda.lowering import Launch, launch, load, program_id, store
from llmjax.kernels.cuda.pages import PageReader, PageRefs, first_page
from llmjax.kernels.cuda.split import WHOLE, Parts, Split
from llmjax.kernels.cuda.tuned import tuned

MERGED = 16  # parts that a program merges at a time


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
        split = tuned(Split.of(group, pages, reader), Split.key(q, pages, reader))
    longest = batch.page_table.shape[1] * pages.page_size
    seen = longest if rules.window is None else min(longest, rules.window)
    parts = Parts.of(batch.kv_len, rules, split, most_keys=seen)
    if split.mosaic and not mosaic_decode.refuses(q, pages):
        return mosaic_decode.decode(q, pages, batch, sinks, parts, rules=rules, heads=split.heads, interpret=interpret)
    kernel = _Kernel(reader, rules, split, group, sinks is not None)
    calibration = q if pages.calibration is None else pages.calibration  # what is not there is not read
    logits = q if sinks is None else sinks.astype(jnp.float32)
    found = (max(1, parts.most), heads)
    shapes = [(found, jnp.float32), (found, jnp.float32), ((*found, reader.value_dim), jnp.float32)]
    out, *sums = launch(
        kernel.decode,
        [jax.ShapeDtypeStruct(*shape) for shape in [((rows, heads, reader.value_dim), q.dtype), *shapes]],
        [q, pages.data, batch.page_table, first_page(batch), calibration, logits, batch.kv_len, parts.programs],
        Launch((kv_heads * -(-group // split.heads), len(parts.programs)), split.warps, split.stages, interpret),
    )
    if not parts.most:  # no row has more than a block
        return out
    (out,) = launch(
        kernel.merge,
        [jax.ShapeDtypeStruct(out.shape, out.dtype)],
        [out, *sums, logits, parts.rows],
        Launch((heads, rows), warps=split.warps, interpret=interpret),
        in_place={0: 0},
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
        sinks: Any,
        kv_len: Any,
        parts: Any,
        out: Any,
        peaks: Any,
        totals: Any,
        sums: Any,
    ) -> None:
        """One part of a row's keys. out: [R, H, value], of rows that are whole; peaks, totals: f32 [parts, H]; sums:
        f32 [parts, H, value]."""
        reader, split = self.reader, self.split
        block, program = program_id(0), program_id(1)
        blocks_of_head = np.int32(-(-self.group // split.heads))
        head = jax.lax.div(block, blocks_of_head)
        row, start, stop, part = (load(parts, (program, np.int32(i))) for i in range(4))

        within = jax.lax.rem(block, blocks_of_head) * split.heads + jnp.arange(split.heads, dtype=jnp.int32)
        inside = within < self.group
        heads = head * self.group + within
        columns = reader.columns()
        values = [
            load(q, (row, heads[:, None], column.index[None]), inside[:, None] & column.inside[None])
            for column in columns
        ]
        position = jnp.zeros_like(within) + (load(kv_len, (row,)) - 1)
        queries = Queries(tuple(v.astype(reader.dtype) for v in values), position, row, head)
        refs = PageRefs(data, table, first_page, calibration)
        partial = attend(queries, Keys(start, stop, split.keys), refs, reader, self.rules)
        of_part, of_row = inside & (part >= 0), inside & (part == WHOLE)
        part = jnp.maximum(part, 0)
        store(peaks, (part, heads), partial.peak, of_part)
        store(totals, (part, heads), partial.total, of_part)
        column, within_value = columns[0].index[None], columns[0].inside[None]
        store(sums, (part, heads[:, None], column), partial.acc, of_part[:, None] & within_value)
        sink = load(sinks, (heads,), inside) if self.has_sinks else None
        found = partial.divided(sink).astype(out.dtype)
        store(out, (row, heads[:, None], column), found, of_row[:, None] & within_value)

    def merge(self, _: Any, peaks: Any, totals: Any, sums: Any, sinks: Any, rows: Any, out: Any) -> None:
        """All parts of a row, for one head; nothing where the row is whole. out: [R, H, value]."""
        head, row = program_id(0), program_id(1)
        first, count = (load(rows, (row, np.int32(i))) for i in range(2))
        columns, number = self.reader.columns()[0], jnp.arange(MERGED, dtype=jnp.int32)
        column, inside = columns.index, columns.inside

        def step(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            peak, total, acc = state
            there = index * MERGED + number < count
            part = first + index * MERGED + number
            peaks_there = jnp.where(there, load(peaks, (part, head), there), MASKED)
            higher = jnp.maximum(peak, peaks_there.max(0))
            weight, shrink = jnp.exp2(peaks_there - higher), jnp.exp2(peak - higher)
            total = total * shrink + (load(totals, (part, head), there) * weight).sum(0)
            values = load(sums, (part[:, None], head, column[None]), there[:, None] & inside[None])
            return higher, total, acc * shrink[:, None] + (values * weight[:, None]).sum(0)[None]

        one = jnp.zeros(1, jnp.float32)
        start = (one + MASKED, one, jnp.zeros((1, len(column)), jnp.float32))
        blocks = jax.lax.div(count + (MERGED - 1), np.int32(MERGED))
        peak, total, acc = jax.lax.fori_loop(0, blocks, step, start)
        sink = load(sinks, (head,)) + one if self.has_sinks else None
        merged = Partial(peak, total, acc).divided(sink).reshape(column.shape)
        store(out, (row, head, column), merged.astype(out.dtype), inside & (count > 0))
