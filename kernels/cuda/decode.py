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

from kernels.attention.types import KVPages
from kernels.cuda.flash import Keys, Partial, Queries, Rules, attend
from kernels.cuda.lowering import MIN_DOT, Launch, launch, load, power_of_2, program_id, store
from kernels.cuda.pages import PageReader, PageRefs

ENOUGH_PROGRAMS = 512
MAX_SPLITS = 32


@dataclass(frozen=True)
class Split:
    """How the keys of a row are divided.

    Args:
        parts: programs that share them; a power of two.
        keys: that a program reads at a time; it takes a multiple of them.
        warps: of a program.
    """

    parts: int
    keys: int
    warps: int = 4

    @classmethod
    def of(cls, rows: int, pages: KVPages, table_width: int, reader: PageReader) -> Split:
        """For so many rows and pages a row."""
        useful = -(-table_width * pages.page_size // reader.block)
        wanted = -(-ENOUGH_PROGRAMS // (rows * pages.data.shape[2]))
        return cls(parts=min(MAX_SPLITS, power_of_2(useful), power_of_2(wanted)), keys=reader.block)


def decode(
    q: jax.Array,
    pages: KVPages,
    kv_len: jax.Array,
    page_table: jax.Array,
    sinks: jax.Array | None,
    *,
    rules: Rules,
    split: Split | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of one query a row, at position ``kv_len - 1``.

    Args:
        q: [R, H, h].
        kv_len: i32 [R]; the output of rows with 0 is 0.
        page_table: i32 [R, P].
        sinks: f32 [H] or None.
        split: how to divide the work; None: as `Split.of` says.

    Returns:
        [R, H, h] in q's dtype.
    """
    rows, heads, head_dim = q.shape
    kv_heads = pages.data.shape[2]
    reader = PageReader.of(pages, q)
    split = split or Split.of(rows, pages, page_table.shape[1], reader)
    kernel = _Kernel(reader, rules, split, heads // kv_heads, sinks is not None)
    calibration = q if pages.calibration is None else pages.calibration  # what is not there is not read
    parts = (rows, heads, split.parts)
    found = launch(
        kernel.decode,
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (parts, parts, (*parts, head_dim))],
        [q, pages.data, page_table, calibration, kv_len],
        Launch((split.parts, kv_heads, rows), warps=split.warps, interpret=interpret),
    )
    (out,) = launch(
        kernel.merge,
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        [*found, q if sinks is None else sinks.astype(jnp.float32)],
        Launch((rows, heads), interpret=interpret),
    )
    return out


@dataclass(frozen=True)
class _Kernel:
    reader: PageReader
    rules: Rules
    split: Split
    group: int
    has_sinks: bool

    def decode(
        self, q: Any, data: Any, table: Any, calibration: Any, kv_len: Any, peaks: Any, totals: Any, sums: Any
    ) -> None:
        """What one part of a row's keys gives. peaks, totals: f32 [R, H, parts]; sums: f32 [R, H, parts, h]."""
        reader, split = self.reader, self.split
        part, head, row = (program_id(axis) for axis in range(3))
        length = load(kv_len, (row,))
        first = self.rules.first_key(length - 1)
        blocks = jax.lax.div(length - first + (split.keys - 1), np.int32(split.keys))
        each = jax.lax.div(blocks + (split.parts - 1), np.int32(split.parts)) * split.keys
        start = first + part * each
        keys = Keys(start, jnp.minimum(start + each, length), split.keys)

        within = jnp.arange(max(MIN_DOT, power_of_2(self.group)), dtype=jnp.int32)
        column = reader.column()
        inside = within < self.group
        heads = head * self.group + within
        where = inside[:, None] & (column < reader.head_dim)[None]
        values = load(q, (row, heads[:, None], column[None]), where).astype(reader.dtype)
        position = jnp.zeros_like(within) + (length - 1)
        queries = Queries(values, position, row, head)
        partial = attend(queries, keys, PageRefs(data, table, calibration), reader, self.rules)
        store(peaks, (row, heads, part), partial.peak, inside)
        store(totals, (row, heads, part), partial.total, inside)
        store(sums, (row, heads[:, None], part, column[None]), partial.acc, where)

    def merge(self, peaks: Any, totals: Any, sums: Any, sinks: Any, out: Any) -> None:
        """All parts of one head. out: [R, H, h]."""
        row, head = program_id(0), program_id(1)
        part, column = jnp.arange(self.split.parts, dtype=jnp.int32), self.reader.column()
        inside = column < self.reader.head_dim
        found = load(peaks, (row, head, part))
        peak = found.max(0)
        weight = jnp.exp2(found - peak)
        total = (load(totals, (row, head, part)) * weight).sum(0)
        acc = (load(sums, (row, head, part[:, None], column[None]), inside[None]) * weight[:, None]).sum(0)
        one = jnp.zeros(1, jnp.float32)
        sink = load(sinks, (head,)) + one if self.has_sinks else None
        merged = Partial(peak + one, total + one, acc[None]).divided(sink)
        store(out, (row, head, column), merged.reshape(column.shape).astype(out.dtype), inside)
