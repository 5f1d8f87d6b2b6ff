"""Products with quantized matrices, straight from the records of a `QTensor`.

Five kernels. Codes become bf16 fragments of tensor cores (`fragments.py`). Where that refuses, because weights are of
another type or codes have levels of their own, they become floats in registers and are multiplied there, for one or two
rows of x, or a tile of weights is dequantized first. Where x has more rows and may be rounded to int8, and rows of the
matrix have one scale, codes are multiplied as they are; and so are those of 8-bit floats, where x may be rounded to
them. All may divide the columns among programs, whose sums XLA adds. What a program computes is in `products.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.cuda import fragments
from llmjax.kernels.cuda.fragments import FragmentPlan
from llmjax.kernels.cuda.lowering import MIN_DOT, Launch, launch, power_of_2, program_id, store
from llmjax.kernels.cuda.plan import MAX_VECTOR_ROWS, ProductPlan
from llmjax.kernels.cuda.products import (
    E4M3,
    FLOAT8_COLUMNS,
    Records,
    Share,
    by_byte_of_word,
    by_column_of_chunk,
    levels_of,
)
from llmjax.kernels.cuda.tuned import Key, form_name
from llmjax.kernels.qtensor import CUDA_TILE, QTensor, group_scales
from llmjax.kernels.row_format import CHUNK, RowFormat

MAX_ROWS = 512  # with more, dequantizing once costs less than dequantizing for each block of rows
MAX_FLOAT8_ROWS = 128  # with more, cuBLASLt's product of 8-bit floats is worth that codes are put in a row for it
MAX_FRAGMENT_ROWS = 128  # the same for `fragments`, on an H100: 256 rows of Q4_K take 1.9 times what both together do
FLOAT8_ALIGNED = 16  # what cuBLASLt wants sizes of 8-bit floats to be multiples of
MIN_INT8_DOT = 32  # columns of the smallest product of int8 on tensor cores
LEAST_AMAX = 1e-30  # a row of zeros still has a scale


def refuses(x: jax.Array, weight: QTensor, *_: jax.Array | None) -> str | None:
    """Why the kernels do not take these arguments; None: they do."""
    if weight.words.ndim != 3:
        return "a stack of matrices"
    if weight.tile != CUDA_TILE:
        return f"rows are interleaved by {weight.tile}, not {CUDA_TILE}"
    if not len(x):
        return "no rows"
    most = MAX_FRAGMENT_ROWS if multiplies_fragments(len(x), weight) else MAX_ROWS
    if float8_refuses(x, weight) is None:
        return f"more than {MAX_FLOAT8_ROWS} rows of 8-bit floats are cuBLASLt's"
    if len(x) > most:
        return f"more than {most} rows are to be multiplied with weights that are dequantized once"
    return None


def plan_of(rows: int, weight: QTensor) -> ProductPlan | FragmentPlan:
    """How a product with ``rows`` rows of x is divided, by arithmetic."""
    if multiplies_fragments(rows, weight):
        return FragmentPlan.of(rows, size_out=weight.size_out, chunks=weight.format.num_chunks)
    block = rows if rows <= MAX_VECTOR_ROWS else min(64, max(MIN_DOT, power_of_2(rows)))
    form = weight.format
    if block > MAX_VECTOR_ROWS and multiplies_float8(weight):
        plan = ProductPlan(block, 2 * CUDA_TILE, FLOAT8_COLUMNS // CHUNK, steps=0, splits=1, warps=4)
        return plan.split(form.num_chunks, -(-weight.size_out // plan.outputs) * -(-rows // block))
    integers = block > MAX_VECTOR_ROWS and multiplies_integers(weight)
    return ProductPlan.of_records(
        block,
        -(-rows // block),
        size_out=weight.size_out,
        chunks=form.num_chunks,
        codes=form.codes,
        depth=MIN_INT8_DOT if integers else MIN_DOT,
    )


def key_of(rows: int, weight: QTensor) -> Key:
    """What the table of a card knows a product by."""
    kernel = "product"
    if multiplies_fragments(rows, weight):
        kernel = "fragments"
    elif rows > MAX_VECTOR_ROWS:
        kernel = "float8" if multiplies_float8(weight) else "integers" if multiplies_integers(weight) else kernel
    return Key.of(kernel, form_name(weight.format), rows, weight.size_out, weight.format.size_in)


def quantized_linear(
    x: jax.Array,
    weight: QTensor,
    bias: jax.Array | None = None,
    used: jax.Array | None = None,
    *,
    plan: ProductPlan | FragmentPlan | None = None,
    interpret: bool = False,
) -> jax.Array:
    """``x @ weight.T + bias``.

    Args:
        x: [T, in]; with more than `MAX_VECTOR_ROWS` rows, rounded to the weight's dtype, or row by row to int8 if
            `multiplies_integers`, or by groups of columns to E4M3 if `multiplies_float8`.
        weight: a single matrix [out, in], tiles of `CUDA_TILE` rows.
        bias: [out] or None.
        plan: how to divide the work; None: as was measured, or `plan_of` says.
        interpret: run as XLA operations on any device.

    Returns:
        f32 [T, out].
    """
    plan = plan or plan_of(len(x), weight).tuned(key_of(len(x), weight), weight.format.num_chunks)
    if weight.columns is not None:
        x = x[:, weight.columns]
    if isinstance(plan, FragmentPlan):
        total = fragments.product(x, weight, plan, interpret=interpret)
        return total if bias is None else total + bias.astype(jnp.float32)
    levels = levels_of(weight)
    kernel = _Kernel(Records(weight.format, weight.dtype, plan), weight.size_out)
    grid = (-(-weight.size_out // plan.outputs), plan.splits, -(-len(x) // plan.rows))
    how = Launch(grid, warps=plan.warps, stages=plan.stages, interpret=interpret)

    def run(body: Callable[..., None], dtype: Any, *arguments: jax.Array) -> jax.Array:
        shape = (plan.splits, len(x), weight.size_out)
        (sums,) = launch(body, [jax.ShapeDtypeStruct(shape, dtype)], arguments, how)
        return sums.sum(0) if plan.splits > 1 else sums[0]

    if plan.rows <= MAX_VECTOR_ROWS:
        total = run(kernel.vectors, jnp.float32, x, weight.words, levels)
    elif multiplies_float8(weight):
        rounded, scales = rounded_to_float8(x, weight.format)
        arguments = (by_byte_of_word(rounded, plan), scales, weight.words)
        total = run(kernel.float8, jnp.float32, *arguments)
    elif multiplies_integers(weight):
        x = x.astype(jnp.float32)
        scale = jnp.maximum(jnp.abs(x).max(1, keepdims=True), LEAST_AMAX) / 127
        rounded = by_column_of_chunk(jnp.round(x / scale).astype(jnp.int8), plan)
        total = run(kernel.integers, jnp.int32, rounded, weight.words) * scale * _row_scales(weight)
    else:
        total = run(kernel.tiles, jnp.float32, kernel.factor.prepared(x), weight.words, levels)
    return total if bias is None else total + bias.astype(jnp.float32)


def multiplies_fragments(rows: int, weight: QTensor) -> bool:
    """Whether codes become bf16 fragments: of one row of x, too, beside seven of zeros, for memory is the limit."""
    others = rows > MAX_VECTOR_ROWS and (multiplies_float8(weight) or multiplies_integers(weight))
    return not others and fragments.refuses(weight) is None


def multiplies_integers(weight: QTensor) -> bool:
    """Whether the codes are int8 with one scale for each row, and x may be rounded to int8."""
    form = weight.format
    simple = form.num_groups == 1 and not (form.zero or form.minimum or form.super_size)
    return weight.activations == "int8" and form.codes.kind == "int" and simple


def multiplies_float8(weight: QTensor) -> bool:
    """Whether x may be rounded to E4M3, and the codes are that times a scale, for each row or for groups of columns."""
    form = weight.format
    simple = not (form.zero or form.minimum or form.super_size)
    grouped = form.num_groups == 1 or form.group_size % FLOAT8_COLUMNS == 0
    return weight.activations == "fp8" and form.codes.kind == "e4m3" and simple and grouped


def float8_refuses(x: jax.Array, weight: QTensor, *_: jax.Array | None) -> str | None:
    """Why a product is not to be one of XLA's of 8-bit floats; None: it may."""
    if weight.words.ndim != 3 or not multiplies_float8(weight):
        return "not E4M3 with E4M3"
    if weight.format.num_groups > 1:
        return "scales of groups of columns"
    if weight.format.size_in % FLOAT8_ALIGNED or weight.size_out % FLOAT8_ALIGNED:
        return f"sizes that are not multiples of {FLOAT8_ALIGNED}"
    return None if len(x) > MAX_FLOAT8_ROWS else f"only more than {MAX_FLOAT8_ROWS} rows gain"


def linear_by_float8(
    x: jax.Array, weight: QTensor, bias: jax.Array | None = None, used: jax.Array | None = None
) -> jax.Array:
    """``x @ weight.T + bias`` as one product of 8-bit floats, cuBLASLt's on a card: f32 [T, out].

    Args:
        x: [T, in]; each row is rounded to E4M3 with a scale of its own, as by `rounded_to_float8`.
        weight: a matrix that `float8_refuses` does not refuse.
        bias: [out] or None.
        used: not looked at.
    """
    if weight.columns is not None:
        x = x[:, weight.columns]
    rounded, scale = rounded_to_float8(x, weight.format)
    # Sums in f32: with the default precision Hopper's have 14 bits.
    out = jax.lax.dot_general(
        rounded,
        weight.float8_codes(),
        (((1,), (1,)), ((), ())),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    out = out * scale * _row_scales(weight)
    return out if bias is None else out + bias.astype(jnp.float32)


def copy_refuses(x: jax.Array, weight: QTensor, *_: jax.Array | None) -> str | None:
    """Why a product is not to be one with the matrix's copy in 16 bits; None: it may."""
    if weight.copy is None:
        return "no copy in 16 bits is kept"
    return None if len(x) > MAX_FRAGMENT_ROWS else f"only more than {MAX_FRAGMENT_ROWS} rows gain"


def rounded_to_float8(x: jax.Array, form: RowFormat) -> tuple[jax.Array, jax.Array]:
    """x [T, in] as E4M3 [T, in] times f32 [T, groups], the groups being those of a matrix's columns.

    As DeepSeek-V3 (arXiv:2412.19437, 3.3.2) rounds: the largest magnitude of a token's group becomes the largest code.
    """
    size = form.size_in if form.num_groups == 1 else form.group_size
    x = x.astype(jnp.float32)
    grouped = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size))).reshape(len(x), -1, size)
    scale = jnp.maximum(jnp.abs(grouped).max(2), LEAST_AMAX) / float(jnp.finfo(E4M3).max)
    # Of a quotient that rounds up, there is no code.
    rounded = jnp.clip(grouped / scale[:, :, None], float(jnp.finfo(E4M3).min), float(jnp.finfo(E4M3).max))
    return rounded.astype(E4M3).reshape(len(x), -1)[:, : x.shape[1]], scale


def _row_scales(weight: QTensor) -> jax.Array:
    """The scale of each row, f32 [out]."""
    records = jnp.swapaxes(weight.words, 1, 2)
    scale, _, _ = group_scales(records.reshape(-1, records.shape[-1]), weight.format)
    return scale[: weight.size_out, 0]


@dataclass(frozen=True)
class _Kernel:
    """The kernels of a format."""

    factor: Records
    size_out: int

    def vectors(self, x: Any, words: Any, levels: Any, out: Any) -> None:
        """Few rows. x: [T, in]; out: f32 [splits, T, out]."""
        share = self._share(words, levels)
        (totals,) = self.factor.vectors(x, [np.int32(row) for row in range(self.factor.plan.rows)], share)
        for row, total in enumerate(totals):
            store(out, (program_id(1), np.int32(row), share.output), total, share.inside)

    def tiles(self, x: Any, words: Any, levels: Any, out: Any) -> None:
        """Blocks of rows. x: [32, T, chunks] in the weight's dtype; out: f32 [splits, T, out]."""
        share, row = self._share(words, levels), self._row()
        inside = row < x.shape[1]
        (sums,) = self.factor.tile(x, row, inside, share)
        store(out, (program_id(1), row[:, None], share.output[None]), sums, inside[:, None] & share.inside[None])

    def integers(self, x: Any, words: Any, out: Any) -> None:
        """Blocks of rows. x: int8 [32, T, chunks]; out: i32 [splits, T, out], sums of products of codes."""
        share, row = self._share(words, None), self._row()
        inside = row < x.shape[1]
        sums = self.factor.integers(x, row, inside, share)
        store(out, (program_id(1), row[:, None], share.output[None]), sums, inside[:, None] & share.inside[None])

    def float8(self, x: Any, scales: Any, words: Any, out: Any) -> None:
        """Blocks of rows. x: E4M3 [4, T, words]; scales: f32 [T, groups]; out: f32 [splits, T, out]."""
        share, row = self._share(words, None), self._row()
        inside = row < x.shape[1]
        sums = self.factor.float8(x, scales, row, inside, share)
        store(out, (program_id(1), row[:, None], share.output[None]), sums, inside[:, None] & share.inside[None])

    def _share(self, words: Any, levels: Any) -> Share:
        return Share.of(self.factor.plan, self.size_out, (words,), levels)

    def _row(self) -> jax.Array:
        rows = self.factor.plan.rows
        return program_id(2) * rows + jnp.arange(rows, dtype=jnp.int32)
