"""Products with quantised matrices, straight from the records of a `QTensor`.

Three kernels. For few rows of x the memory is the limit: weights become floats in registers and are multiplied there,
and scales are applied to sums of 32 products instead of to weights. For more rows a tile of weights is dequantised
into the weight's dtype and multiplied on tensor cores; or, where x may be rounded to int8 and rows of the matrix have
one scale, codes are multiplied as they are. All may divide the columns among programs, whose sums XLA adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.cuda.lowering import MIN_DOT, Launch, dot, launch, load, power_of_2, program_id, store
from kernels.cuda.records import Place, Run, code_floats, code_words, runs, weight_line
from kernels.qtensor import CHUNK, CUDA_TILE, QTensor, RowFormat, group_scales

# Not measured on a card yet: sizes that fill one by the arithmetic in README.md.
MAX_VECTOR_ROWS = 2  # with more, tensor cores; code and compile time grow with the rows
MAX_ROWS = 512  # with more, dequantising once costs less than dequantising for each block of rows
ENOUGH_PROGRAMS = 192

LEAST_AMAX = 1e-30  # a row of zeros still has a scale


def refuses(x: jax.Array, weight: QTensor, bias: jax.Array | None = None) -> str | None:
    """Why the kernels do not take these arguments; None: they do."""
    if weight.words.ndim != 3:
        return "a stack of matrices"
    if weight.tile != CUDA_TILE:
        return f"rows are interleaved by {weight.tile}, not {CUDA_TILE}"
    if not len(x):
        return "no rows"
    if len(x) > MAX_ROWS:
        return f"more than {MAX_ROWS} rows are to be multiplied with weights that are dequantised once"
    return None


@dataclass(frozen=True)
class Plan:
    """How a product is divided.

    Args:
        rows: of x that a program takes.
        outputs: rows of the matrix that a program takes, a multiple of the tile.
        chunks: of 32 columns that it reads at a time.
        steps: that often.
        splits: programs that share the columns.
        warps: of a program.
    """

    rows: int
    outputs: int
    chunks: int
    steps: int
    splits: int
    warps: int

    @classmethod
    def of(cls, rows: int, weight: QTensor) -> Plan:
        """The plan for so many rows of x."""
        chunks = weight.format.num_chunks
        few = rows <= MAX_VECTOR_ROWS
        block = rows if few else min(64, max(MIN_DOT, power_of_2(rows)))
        outputs = CUDA_TILE if few else 2 * CUDA_TILE
        programs = -(-weight.size_out // outputs) * -(-rows // block)
        at_a_time = min(64 if few else 32, max(MIN_DOT, power_of_2(chunks)))
        while at_a_time > MIN_DOT and programs * -(-chunks // at_a_time) < ENOUGH_PROGRAMS:
            at_a_time //= 2  # a small matrix is read by more programs, each with less of it
        steps = -(-chunks // at_a_time)
        splits = min(steps, power_of_2(-(-ENOUGH_PROGRAMS // programs)))
        return cls(
            rows=block,
            outputs=outputs,
            chunks=at_a_time,
            steps=-(-steps // splits),
            splits=splits,
            warps=min(8, at_a_time // 4) if few else 4,
        )


def quantized_linear(
    x: jax.Array, weight: QTensor, bias: jax.Array | None = None, *, plan: Plan | None = None, interpret: bool = False
) -> jax.Array:
    """``x @ weight.T + bias``.

    Args:
        x: [T, in]; with more than `MAX_VECTOR_ROWS` rows, rounded to the weight's dtype, or row by row to int8 if
            `multiplies_integers`.
        weight: a single matrix [out, in], tiles of `CUDA_TILE` rows.
        bias: [out] or None.
        plan: how to divide the work; None: as `Plan.of` says.
        interpret: run as XLA operations on any device.

    Returns:
        f32 [T, out].
    """
    plan = plan or Plan.of(len(x), weight)
    form = weight.format
    if weight.columns is not None:
        x = x[:, weight.columns]
    levels = form.codes.levels
    table = jnp.asarray(levels + (0.0,) * (16 - len(levels)), jnp.float32) if levels else weight.words  # not read
    kernel = _Kernel(form, weight.size_out, plan)
    grid = (-(-weight.size_out // plan.outputs), plan.splits, -(-len(x) // plan.rows))
    how = Launch(grid, warps=plan.warps, interpret=interpret)

    def run(body: Callable[..., None], dtype: Any, *arguments: jax.Array) -> jax.Array:
        shape = (plan.splits, len(x), weight.size_out)
        (sums,) = launch(body, [jax.ShapeDtypeStruct(shape, dtype)], arguments, how)
        return sums.sum(0) if plan.splits > 1 else sums[0]

    if plan.rows <= MAX_VECTOR_ROWS:
        total = run(kernel.vectors, jnp.float32, x, weight.words, table)
    elif multiplies_integers(weight):
        x = x.astype(jnp.float32)
        scale = jnp.maximum(jnp.abs(x).max(1, keepdims=True), LEAST_AMAX) / 127
        rounded = _by_column_of_chunk(jnp.round(x / scale).astype(jnp.int8), plan)
        total = run(kernel.integers, jnp.int32, rounded, weight.words) * scale * _row_scales(weight)
    else:
        total = run(kernel.tiles, jnp.float32, _by_column_of_chunk(x.astype(weight.dtype), plan), weight.words, table)
    return total if bias is None else total + bias.astype(jnp.float32)


def multiplies_integers(weight: QTensor) -> bool:
    """Whether the codes are int8 with one scale for each row, and x may be rounded to int8."""
    form = weight.format
    simple = form.num_groups == 1 and not (form.zero or form.minimum or form.super_size)
    return weight.activations == "int8" and form.codes.kind == "int" and simple


def _row_scales(weight: QTensor) -> jax.Array:
    """The scale of each row, f32 [out]."""
    records = jnp.swapaxes(weight.words, 1, 2)
    scale, _, _ = group_scales(records.reshape(-1, records.shape[-1]), weight.format)
    return scale[: weight.size_out, 0]


def _by_column_of_chunk(x: jax.Array, plan: Plan) -> jax.Array:
    """x [T, in] as [32, T, chunks]: what one column of all chunks multiplies lies together."""
    chunks = plan.splits * plan.steps * plan.chunks
    padded = jnp.pad(x, ((0, 0), (0, chunks * CHUNK - x.shape[1])))
    return padded.reshape(len(x), chunks, CHUNK).transpose(2, 0, 1)


@dataclass(frozen=True)
class _Kernel:
    """The kernels of a format."""

    form: RowFormat
    size_out: int
    plan: Plan

    def vectors(self, x: Any, words: Any, levels: Any, out: Any) -> None:
        """Few rows. x: [T, in]; out: f32 [splits, T, out]."""
        form, plan = self.form, self.plan
        first, split = self._first(words), program_id(1)

        def step(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            place = first.further(index * plan.chunks)
            for run in runs(form):
                inner = [jnp.zeros((plan.chunks, plan.outputs), jnp.float32) for _ in sums]
                input_sum = [jnp.zeros(plan.chunks, jnp.float32) for _ in sums]
                codes = [code_words(place, word, form.codes) for word in run.words]  # all on their way at once
                for word, piece, byte in itertools.product(run.words, run.pieces, range(4)):
                    numbers = code_floats(codes[word - run.words.start], piece, byte, form.codes, levels)
                    where = place.chunk * CHUNK + run.column(word, piece, byte)
                    for row in range(plan.rows):
                        value = load(x, (np.int32(row), where), where < form.size_in).astype(jnp.float32)
                        inner[row] += numbers * value[:, None]
                        input_sum[row] += value
                gain, shift = weight_line(place, form, run.half)
                sums = tuple(
                    total + gain * product + shift * inputs[:, None]
                    for total, product, inputs in zip(sums, inner, input_sum, strict=True)
                )
            return sums

        start = tuple(jnp.zeros((plan.chunks, plan.outputs), jnp.float32) for _ in range(plan.rows))
        for row, total in enumerate(jax.lax.fori_loop(0, plan.steps, step, start)):
            store(out, (split, np.int32(row), first.output), total.sum(0), first.inside)

    def tiles(self, x: Any, words: Any, levels: Any, out: Any) -> None:
        """Blocks of rows. x: [32, T, chunks] in the weight's dtype; out: f32 [splits, T, out]."""
        form, plan = self.form, self.plan
        first, split = self._first(words), program_id(1)
        row = program_id(2) * plan.rows + jnp.arange(plan.rows, dtype=jnp.int32)

        def step(index: jax.Array, sums: jax.Array) -> jax.Array:
            place = first.further(index * plan.chunks)
            for run in runs(form):
                gain, shift = weight_line(place, form, run.half)

                def multiply(word: jax.Array, sums: jax.Array, run: Run = run, line: Any = (gain, shift)) -> jax.Array:
                    codes = code_words(place, word, form.codes)
                    for piece, byte in itertools.product(run.pieces, range(4)):
                        weights = code_floats(codes, piece, byte, form.codes, levels) * line[0] + line[1]
                        where = (run.column(word, piece, byte), row[:, None], place.chunk[None])
                        inputs = load(x, where, (row < x.shape[1])[:, None])
                        sums += dot(inputs, weights.astype(inputs.dtype))
                    return sums

                sums = jax.lax.fori_loop(run.words.start, run.words.stop, multiply, sums)
            return sums

        sums = jax.lax.fori_loop(0, plan.steps, step, jnp.zeros((plan.rows, plan.outputs), jnp.float32))
        inside = (row < x.shape[1])[:, None] & first.inside[None]
        store(out, (split, row[:, None], first.output[None]), sums, inside)

    def integers(self, x: Any, words: Any, out: Any) -> None:
        """Blocks of rows. x: int8 [32, T, chunks]; out: i32 [splits, T, out], sums of products of codes."""
        form, plan = self.form, self.plan
        first, split = self._first(words), program_id(1)
        row = program_id(2) * plan.rows + jnp.arange(plan.rows, dtype=jnp.int32)
        (run,) = runs(form)

        def multiply(index: jax.Array, sums: jax.Array) -> jax.Array:
            step, word = jax.lax.div(index, np.int32(len(run.words))), jax.lax.rem(index, np.int32(len(run.words)))
            place = first.further(step * plan.chunks)
            (codes,) = code_words(place, word, form.codes)
            for byte in range(4):
                where = (run.column(word, 0, byte), row[:, None], place.chunk[None])
                inputs = load(x, where, (row < x.shape[1])[:, None])
                sums += dot(inputs, (codes >> 8 * byte).astype(jnp.int8))
            return sums

        start = jnp.zeros((plan.rows, plan.outputs), jnp.int32)
        sums = jax.lax.fori_loop(0, plan.steps * len(run.words), multiply, start)
        inside = (row < x.shape[1])[:, None] & first.inside[None]
        store(out, (split, row[:, None], first.output[None]), sums, inside)

    def _first(self, words: Any) -> Place:
        """What a program reads first."""
        plan = self.plan
        output = program_id(0) * plan.outputs + jnp.arange(plan.outputs, dtype=jnp.int32)
        chunk = program_id(1) * (plan.steps * plan.chunks) + jnp.arange(plan.chunks, dtype=jnp.int32)
        return Place(words, output, output < self.size_out, chunk, self.form.num_chunks)
