"""Attention of rows with several queries for Hopper, by Mosaic GPU: bulk copies of pages, products of warpgroups.

One warpgroup asks the copy engine for pages, two others multiply, each with its 64 rows of a tile, and take turns: one
multiplies while the other computes its softmax (FlashAttention-3, arXiv:2407.08608). Tiles of queries are gathered and
put back by XLA: rows of a tile that belong to nobody are then nowhere stored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from llmjax.kernels.attention.types import KVPages, RaggedBatch
from llmjax.kernels.cuda.flash import LEAST_TOTAL, MASKED, QueryRules
from llmjax.kernels.cuda.lowering import power_of_2
from llmjax.kernels.cuda.ragged import Blocks
from llmjax.kernels.cuda.tuned import default_device

ROWS = 64  # of a warpgroup's product
WARPGROUPS = 2  # that multiply
COLUMNS = 64  # of a head that lie together in shared memory
KEYS = 128  # at a time
STAGES = 2  # of the pipeline of keys and values
LOG2_E = math.log2(math.e)
CAPABILITY = "9.0"  # neither older nor newer cards have its instructions
HEAD_DIMS = (64, 128)  # registers hold no more
FLOATS = (jnp.bfloat16, jnp.float16)


def refuses(q: jax.Array, pages: KVPages, sinks: jax.Array | None) -> str | None:
    """Why the kernel does not take these; None: it does."""
    group, head_dim = q.shape[1] // pages.data.shape[2], q.shape[2]
    capability = getattr(default_device(), "compute_capability", None)
    if capability != CAPABILITY:
        return f"a card of compute capability {capability} does not multiply by warpgroups as Hopper does"
    if q.dtype not in FLOATS or pages.dtype != q.dtype:
        return f"queries are {q.dtype}, pages {pages.dtype}"
    if pages.layout.value_dim is not None:
        return "pages are latent"
    if head_dim not in HEAD_DIMS:
        return f"the head size {head_dim} is neither of {HEAD_DIMS}"
    if pages.page_size % 8 or KEYS % pages.page_size:
        return f"pages of {pages.page_size} tokens"
    if group > ROWS * WARPGROUPS:
        return f"{group} heads share a key"
    return None if sinks is None else "sinks"


def prefill(
    q: jax.Array, pages: KVPages, batch: RaggedBatch, count: jax.Array, *, rules: QueryRules, interpret: Any = None
) -> jax.Array:
    """``llmjax.kernels.cuda.prefill.prefill``, as far as `refuses` allows.

    Args:
        interpret: parameters of Pallas' interpreter of Mosaic GPU, which simulates memories, copies and barriers on any
            device.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = pages.data.shape[2]
    group = heads // kv_heads
    width = power_of_2(group)  # of a token in a tile
    tile_tokens = ROWS * WARPGROUPS // width  # tokens of a tile
    blocks = Blocks.of(count, size=tile_tokens, most=tokens)
    programs = len(blocks.group)

    start, before = batch.query_start[:-1], batch.kv_len - count
    token = start[blocks.group][:, None] + blocks.first[:, None] + jnp.arange(tile_tokens)  # [programs, own]
    tiles = q.reshape(tokens, kv_heads, group, head_dim).at[token].get(mode="fill", fill_value=0)
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, 0), (0, width - group), (0, 0)))
    tiles = tiles.transpose(2, 0, 1, 3, 4).reshape(kv_heads, programs, WARPGROUPS, ROWS, head_dim)

    # Row of the page table, position of the first query, first block of keys, how many blocks, how many of them all
    # queries see whole, how many keys the row has, the layer's first page.
    position = before[blocks.group] + blocks.first
    last = jnp.minimum(position + tile_tokens, batch.kv_len[blocks.group])
    first_block = rules.first_key(position) // KEYS
    stop = jnp.where(blocks.first < count[blocks.group], -(-last // KEYS), first_block)
    whole = jnp.zeros_like(stop) if rules.window is not None else jnp.minimum((position + 1) // KEYS, stop)
    first_page = jnp.full(programs, batch.first_page, jnp.int32)
    have = batch.kv_len[blocks.group]
    work = [blocks.group, position, first_block, stop - first_block, whole, have, first_page]
    work = jnp.stack(work, 1).astype(jnp.int32)
    kernel = _Kernel(rules, pages.page_size, width, head_dim, batch.page_table.shape[1], q.dtype, interpret is not None)
    call = mosaic.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(tiles.shape, q.dtype),
        grid=(programs, kv_heads),
        grid_names=("program", "head"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=mosaic.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    out = call(tiles, pages.data, batch.page_table.reshape(-1), work.reshape(-1))

    result = out.reshape(kv_heads, programs * tile_tokens, width, head_dim)[:, :, :group]
    number = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.searchsorted(batch.query_start, number, side="right", method="compare_all") - 1
    row = jnp.minimum(row, len(count) - 1)
    each = (count + tile_tokens - 1) // tile_tokens
    place = (jnp.cumsum(each) - each)[row] * tile_tokens + number - start[row]
    return result[:, jnp.minimum(place, programs * tile_tokens - 1)].swapaxes(0, 1).reshape(q.shape)


@dataclass(frozen=True)
class _Kernel:
    rules: QueryRules
    page_size: int
    width: int
    head_dim: int
    table_width: int
    dtype: jnp.dtype
    interpret: bool

    def __call__(self, q: Any, data: Any, table: Any, work: Any, out: Any) -> None:
        """q, out: [K, programs, warpgroups, rows, h]; table: i32 [R * P]; work: i32 [programs * 7]."""
        transforms = (mosaic.TilingTransform((8, COLUMNS)), mosaic.SwizzleTransform(128))
        keys = mosaic.SMEM((STAGES, KEYS, self.head_dim), self.dtype, transforms=transforms)
        filled = mosaic.Barrier(num_arrivals=KEYS // self.page_size, num_barriers=STAGES)
        read = mosaic.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES)
        pl.run_scoped(
            partial(self._run, q, data, table, work, out),
            mosaic.SMEM((WARPGROUPS, ROWS, self.head_dim), self.dtype, transforms=transforms),
            mosaic.Barrier(num_barriers=WARPGROUPS),
            mosaic.Barrier(num_arrivals=WARPGROUPS),
            (keys, filled, read),
            (keys, filled, read),
            collective_axes="warpgroup",
        )

    def _run(
        self, q: Any, data: Any, table: Any, work: Any, out: Any, tiles: Any, q_ready: Any, turn: Any, *parts: Any
    ) -> None:
        """turn: a barrier of both warpgroups; parts: of keys and of values, memory, and when it is filled and read."""
        # The last tiles of a row see the most keys: those begin first.
        program = jax.lax.axis_size("program") - 1 - jax.lax.axis_index("program")
        head, warpgroup = jax.lax.axis_index("head"), jax.lax.axis_index("warpgroup")
        row, position, first, blocks, whole, have, first_page = (work[program * 7 + i] for i in range(7))
        (keys, keys_filled, keys_read), (values, values_filled, values_read) = parts

        @pl.when(warpgroup == WARPGROUPS)
        def _() -> None:
            mosaic.set_max_registers(40, action="decrease")

            @pl.loop(0, blocks)
            def _(block: jax.Array) -> None:
                stage = jax.lax.rem(block, jnp.int32(STAGES))
                for part, (memory, filled, read) in enumerate(parts):
                    pl.when(block >= STAGES)(partial(mosaic.barrier_wait, read.at[stage]))
                    for i in range(KEYS // self.page_size):
                        number = (first + block) * (KEYS // self.page_size) + i
                        last = jax.lax.div(have - 1, jnp.int32(self.page_size))  # after it the table may hold anything
                        page = first_page + table[row * self.table_width + jnp.minimum(number, last)]
                        place = memory.at[stage, pl.ds(i * self.page_size, self.page_size)]
                        mosaic.copy_gmem_to_smem(data.at[page, part, head], place, filled.at[stage])

            @pl.loop(jnp.maximum(blocks - STAGES, 0), blocks)
            def _(block: jax.Array) -> None:  # every phase of a barrier is waited for
                for _, _, read in parts:
                    mosaic.barrier_wait(read.at[jax.lax.rem(block, jnp.int32(STAGES))])

        @pl.when(warpgroup < WARPGROUPS)
        def _() -> None:
            mosaic.set_max_registers(232, action="increase")
            tile = tiles.at[warpgroup]
            mosaic.copy_gmem_to_smem(q.at[head, program, warpgroup], tile, q_ready.at[warpgroup])
            mosaic.barrier_wait(q_ready.at[warpgroup])
            by_row = mosaic.Layout.WGMMA.reduce(1)
            peak = self._laid_out(jnp.full((ROWS,), MASKED, jnp.float32), by_row)
            total = self._laid_out(jnp.zeros((ROWS,), jnp.float32), by_row)
            acc = self._laid_out(jnp.zeros((ROWS, self.head_dim), jnp.float32), mosaic.Layout.WGMMA)

            def take_turn() -> None:
                mosaic.barrier_arrive(turn)
                mosaic.barrier_wait(turn)

            def step(block: jax.Array, state: tuple[jax.Array, ...], *, masked: bool) -> tuple[jax.Array, ...]:
                peak, total, acc = state
                stage = jax.lax.rem(block, jnp.int32(STAGES))
                mosaic.barrier_wait(keys_filled.at[stage])
                logits = self._product(tile, keys.at[stage], meanwhile=take_turn, transpose=True)
                mosaic.barrier_arrive(keys_read.at[stage])

                logits = self.rules.cap(logits)
                if masked:
                    lane, number = (self._iota((ROWS, KEYS), axis) for axis in range(2))
                    query = position + jax.lax.div(lane + warpgroup * ROWS, jnp.int32(self.width))
                    key = (first + block) * KEYS + number
                    visible = key <= query
                    if self.rules.window is not None:
                        visible &= key > query - self.rules.window
                    logits = jnp.where(visible, logits, MASKED)
                higher = jnp.maximum(peak, logits.max(axis=1))
                shrink = jnp.exp2(peak - higher)
                weights = jnp.exp2(logits - jax.lax.broadcast_in_dim(higher, logits.shape, [0]))
                if masked:  # where a query sees nothing the peak is that of what is masked
                    weights = jnp.where(visible, weights, 0.0)
                total = total * shrink + weights.sum(axis=1)
                acc = acc * jax.lax.broadcast_in_dim(shrink, acc.shape, [0])
                narrow = weights.astype(tile.dtype)
                if not self.interpret:  # the softmax is done before the turn ends
                    acc, total, higher, narrow = jax.lax.optimization_barrier((acc, total, higher, narrow))
                mosaic.barrier_arrive(turn)
                mosaic.barrier_wait(values_filled.at[stage])
                if masked:
                    self._clear(values.at[stage], have - (first + block) * KEYS)
                mosaic.barrier_wait(turn)
                acc = self._product(narrow, values.at[stage], acc)
                mosaic.barrier_arrive(values_read.at[stage])
                return higher, total, acc

            pl.when(warpgroup == 1)(take_turn)
            state = jax.lax.fori_loop(0, whole, partial(step, masked=False), (peak, total, acc))
            peak, total, acc = jax.lax.fori_loop(whole, blocks, partial(step, masked=True), state)
            pl.when(warpgroup == 0)(take_turn)
            acc = acc / jax.lax.broadcast_in_dim(jnp.maximum(total, LEAST_TOTAL), acc.shape, [0])
            tile[...] = acc.astype(tile.dtype)
            mosaic.commit_smem()
            mosaic.copy_smem_to_gmem(tile, out.at[head, program, warpgroup])
            mosaic.wait_smem_to_gmem(0)

    def _product(
        self,
        a: Any,
        b: Any,
        acc: jax.Array | None = None,
        *,
        meanwhile: Callable[[], None] = lambda: None,
        transpose: bool = False,
    ) -> jax.Array:
        """A warpgroup's ``acc + a @ b``, f32; b is in shared memory, a there or in registers.

        Args:
            acc: None: zeros.
            meanwhile: is done while tensor cores multiply.
        """
        if self.interpret:  # the interpreter knows products of plain references alone, and no sums in place
            a, b = a[...].astype(jnp.float32), b[...].astype(jnp.float32)
            meanwhile()
            product = jnp.dot(a, b.T if transpose else b)
            return product if acc is None else acc + product

        def multiply(sums: Any) -> Any:
            mosaic.wgmma(sums, a, b.transpose((1, 0)) if transpose else b)
            meanwhile()
            return sums[...] if acc is None else None

        if acc is None:
            found: jax.Array = pl.run_scoped(multiply, mosaic.ACC((ROWS, KEYS), jnp.float32))
        else:
            found = pl.run_state(multiply)(mosaic.ACC.init(acc))
        return found

    def _clear(self, values: Any, count: jax.Array) -> None:
        """Values after the first ``count`` become zeros: pages may hold NaN where nobody has written.
        Both warpgroups do it, with the same outcome."""

        @pl.when(count < KEYS)
        def _() -> None:
            for first, column in itertools.product(range(0, KEYS, ROWS), range(0, self.head_dim, COLUMNS)):
                part = values.at[pl.ds(first, ROWS), pl.ds(column, COLUMNS)]
                values_there = part[...] if self.interpret else mosaic.load(part, (), layout=mosaic.Layout.WGMMA)
                number = self._iota((ROWS, COLUMNS), 0) + first
                part[...] = jnp.where(number < count, values_there, jnp.zeros_like(values_there))
            mosaic.commit_smem()

    def _laid_out(self, x: jax.Array, layout: Any) -> jax.Array:
        return x if self.interpret else mosaic.layout_cast(x, layout)

    def _iota(self, shape: tuple[int, int], axis: int) -> jax.Array:
        if self.interpret:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return mosaic.broadcasted_iota(jnp.int32, shape, axis, layout=mosaic.Layout.WGMMA)
