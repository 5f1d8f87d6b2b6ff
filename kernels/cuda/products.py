"""Products of some rows of x with some rows of matrices: what a program computes, for single matrices and for stacks.

Each kind of matrix has two ways. `vectors` is for one or two rows, where the memory is the limit: products are made and
summed in registers. `tile` is for more, on tensor cores. Both take several matrices that are stored alike, so that x is
read once for all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.cuda.lowering import dot, load, program_id
from llmjax.kernels.cuda.plan import MAX_VECTOR_ROWS, ProductPlan
from llmjax.kernels.cuda.records import Line, Place, Run, code_floats, code_line, code_words, runs, weight_line
from llmjax.kernels.qtensor import QTensor
from llmjax.kernels.row_format import CHUNK, RowFormat

E4M3 = jnp.float8_e4m3fn
FLOAT8_COLUMNS = 128  # of a step of `Records.float8`: the least groups that it takes, and four of the deepest products


@dataclass(frozen=True)
class Share:
    """The share of a product that a program computes: some rows of matrices that are stored alike, some columns."""

    refs: tuple[Any, ...]  # the matrices, or the stacks
    at: tuple[Any, ...]  # which of a stack
    levels: Any  # reference, f32 [16], for codes that have them
    output: jax.Array  # i32 [N], rows of the matrices
    inside: jax.Array  # bool [N], whether they have them
    first: jax.Array  # i32, the first chunk of 32 columns
    chunk: jax.Array  # i32 [C], the chunks that are read first
    steps: Any  # how often C chunks are read

    @classmethod
    def of(
        cls,
        plan: ProductPlan,
        size_out: int,
        refs: tuple[Any, ...],
        levels: Any,
        *,
        at: tuple[Any, ...] = (),
        busy: jax.Array | None = None,
    ) -> Share:
        """The share of this program, whose place in the grid is (outputs, split, ...).

        Args:
            busy: where false, nothing is read and sums are zero; None: true, and the loop has a static length.
        """
        output = program_id(0) * plan.outputs + jnp.arange(plan.outputs, dtype=jnp.int32)
        first = program_id(1) * (plan.steps * plan.chunks)
        chunk = first + jnp.arange(plan.chunks, dtype=jnp.int32)
        steps = plan.steps if busy is None else jnp.where(busy, np.int32(plan.steps), np.int32(0))
        return cls(refs, at, levels, output, output < size_out, first, chunk, steps)


class Factor(Protocol):
    """A kind of matrix in a kernel; static."""

    @property
    def plan(self) -> ProductPlan: ...

    def prepared(self, x: jax.Array) -> jax.Array:
        """x [T, in] as the kernel reads it."""

    def vectors(self, x: Any, rows: Sequence[Any], share: Share) -> list[list[jax.Array]]:
        """Sums f32 [N] for each matrix and each row.

        Args:
            x: reference to what `prepared` gave.
            rows: i32, of x.
        """

    def tile(self, x: Any, rows: jax.Array, inside: jax.Array, share: Share) -> tuple[jax.Array, ...]:
        """Sums f32 [M, N] for each matrix.

        Args:
            rows: i32 [M], of x.
            inside: bool [M]; sums of other rows are zero.
        """


@dataclass(frozen=True)
class Records:
    """Matrices of `QTensor`s. With few rows, scales multiply sums of 32 products; with more, a tile of weights is
    dequantized into the weights' dtype."""

    form: RowFormat
    dtype: jnp.dtype
    plan: ProductPlan

    def prepared(self, x: jax.Array) -> jax.Array:
        return x if self.plan.rows <= MAX_VECTOR_ROWS else by_column_of_chunk(x.astype(self.dtype), self.plan)

    def vectors(self, x: Any, rows: Sequence[Any], share: Share) -> list[list[jax.Array]]:
        form, plan = self.form, self.plan
        shape = (plan.chunks, plan.outputs)

        def step(index: jax.Array, sums: list[list[jax.Array]]) -> list[list[jax.Array]]:
            places = [place.further(index * plan.chunks) for place in self._places(share)]
            for run in runs(form):
                inner = [[jnp.zeros(shape, jnp.float32) for _ in rows] for _ in places]
                input_sum = [jnp.zeros(plan.chunks, jnp.float32) for _ in rows]
                # All codes are on their way at once.
                codes = [[code_words(place, word, form.codes) for word in run.words] for place in places]
                for word, piece, byte in itertools.product(run.words, run.pieces, range(4)):
                    column = places[0].chunk * CHUNK + run.column(word, piece, byte)
                    values = [load(x, (row, column), column < form.size_in).astype(jnp.float32) for row in rows]
                    for total, words in zip(inner, codes, strict=True):
                        numbers = code_floats(words[word - run.words.start], piece, byte, form.codes, share.levels)
                        for i, value in enumerate(values):
                            total[i] += numbers * value[:, None]
                    input_sum = [total + value for total, value in zip(input_sum, values, strict=True)]
                lines = [weight_line(place, form, run.half, line=code_line(form.codes)) for place in places]
                sums = [
                    [s + gain * p + shift * i[:, None] for s, p, i in zip(total, products, input_sum, strict=True)]
                    for total, products, (gain, shift) in zip(sums, inner, lines, strict=True)
                ]
            return sums

        start = [[jnp.zeros(shape, jnp.float32) for _ in rows] for _ in share.refs]
        found = jax.lax.fori_loop(0, share.steps, step, start)
        return [[total.sum(0) for total in totals] for totals in found]

    def tile(self, x: Any, rows: jax.Array, inside: jax.Array, share: Share) -> tuple[jax.Array, ...]:
        form, plan = self.form, self.plan

        def step(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            places = [place.further(index * plan.chunks) for place in self._places(share)]
            for run in runs(form):
                lines = [weight_line(place, form, run.half, line=code_line(form.codes)) for place in places]

                def multiply(
                    word: jax.Array, sums: tuple[jax.Array, ...], run: Run = run, lines: Any = lines
                ) -> tuple[jax.Array, ...]:
                    codes = [code_words(place, word, form.codes) for place in places]
                    for piece, byte in itertools.product(run.pieces, range(4)):
                        where = (run.column(word, piece, byte), rows[:, None], places[0].chunk[None])
                        inputs = load(x, where, inside[:, None])
                        weights = [
                            code_floats(words, piece, byte, form.codes, share.levels) * gain + shift
                            for words, (gain, shift) in zip(codes, lines, strict=True)
                        ]
                        sums = tuple(
                            s + dot(inputs, w.astype(inputs.dtype)) for s, w in zip(sums, weights, strict=True)
                        )
                    return sums

                sums = jax.lax.fori_loop(run.words.start, run.words.stop, multiply, sums)
            return sums

        start = tuple(jnp.zeros((len(rows), plan.outputs), jnp.float32) for _ in share.refs)
        return jax.lax.fori_loop(0, share.steps, step, start)

    def integers(self, x: Any, rows: jax.Array, inside: jax.Array, share: Share) -> jax.Array:
        """Sums of products of codes, i32 [M, N], where x is int8 and codes are 8-bit integers in one group."""
        plan = self.plan
        (run,) = runs(self.form)
        (place,) = self._places(share)

        def multiply(index: jax.Array, sums: jax.Array) -> jax.Array:
            step, word = jax.lax.div(index, np.int32(len(run.words))), jax.lax.rem(index, np.int32(len(run.words)))
            here = place.further(step * plan.chunks)
            (codes,) = code_words(here, word, self.form.codes)
            for byte in range(4):
                where = (run.column(word, 0, byte), rows[:, None], here.chunk[None])
                sums += dot(load(x, where, inside[:, None]), (codes >> 8 * byte).astype(jnp.int8))
            return sums

        start = jnp.zeros((len(rows), plan.outputs), jnp.int32)
        return jax.lax.fori_loop(0, share.steps * len(run.words), multiply, start)

    def float8(self, x: Any, scales: Any, rows: jax.Array, inside: jax.Array, share: Share) -> jax.Array:
        """Sums f32 [M, N] where x and codes are E4M3 and weights are nothing but codes times the scale of their group:
        products of ``FLOAT8_COLUMNS`` columns on tensor cores, which both scales then multiply.

        Args:
            x: reference, E4M3 [4, T, words of a row], from `by_byte_of_word`.
            scales: reference, f32 [T, groups], of x.
        """
        form, plan = self.form, self.plan
        (place,) = self._places(share)
        words, lanes = CHUNK // 4, jnp.arange(FLOAT8_COLUMNS // 4, dtype=jnp.int32)  # a chunk's; those of a step

        def multiply(step: jax.Array, sums: jax.Array) -> jax.Array:
            first = share.first + step * plan.chunks
            word = first * words + lanes
            codes = replace(place, chunk=jax.lax.div(word, np.int32(words))).read(word)
            total = jnp.zeros_like(sums)
            for byte in range(4):
                inputs = load(x, (np.int32(byte), rows[:, None], word[None]), inside[:, None])
                weights = jax.lax.bitcast_convert_type((codes >> np.uint32(8 * byte)).astype(jnp.uint8), E4M3)
                total += dot(inputs, weights)
            gain, _ = weight_line(replace(place, chunk=first + jnp.zeros(1, jnp.int32)), form, 0, line=Line(1.0, 0.0))
            group = jnp.minimum(jax.lax.div(first * CHUNK, np.int32(form.group_size)), form.num_groups - 1)
            scale = load(scales, (rows, group), inside)
            return sums + total * scale[:, None] * gain

        start = jnp.zeros((len(rows), plan.outputs), jnp.float32)
        return jax.lax.fori_loop(0, share.steps, multiply, start)

    def _places(self, share: Share) -> list[Place]:
        chunks = self.form.num_chunks
        return [Place(ref, share.at, share.output, share.inside, share.chunk, chunks) for ref in share.refs]


@dataclass(frozen=True)
class Floats:
    """Plain matrices [out, in], or stacks of them."""

    size_in: int
    dtype: jnp.dtype
    plan: ProductPlan

    def prepared(self, x: jax.Array) -> jax.Array:
        return x.astype(self.dtype)

    def vectors(self, x: Any, rows: Sequence[Any], share: Share) -> list[list[jax.Array]]:
        shape = (self.plan.outputs, self.plan.chunks * CHUNK)

        def step(index: jax.Array, sums: list[list[jax.Array]]) -> list[list[jax.Array]]:
            column = self._column(index, share)
            within = column < self.size_in
            weights = [self._rows(ref, column, within, share).astype(jnp.float32) for ref in share.refs]
            values = [load(x, (row, column), within).astype(jnp.float32) for row in rows]
            return [
                [s + weight * value[None] for s, value in zip(total, values, strict=True)]
                for total, weight in zip(sums, weights, strict=True)
            ]

        start = [[jnp.zeros(shape, jnp.float32) for _ in rows] for _ in share.refs]
        found = jax.lax.fori_loop(0, share.steps, step, start)
        return [[total.sum(1) for total in totals] for totals in found]

    def tile(self, x: Any, rows: jax.Array, inside: jax.Array, share: Share) -> tuple[jax.Array, ...]:
        def step(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            column = self._column(index, share)
            within = column < self.size_in
            inputs = load(x, (rows[:, None], column[None]), inside[:, None] & within[None])
            return tuple(
                total + dot(inputs, self._rows(ref, column, within, share), transpose_b=True)
                for total, ref in zip(sums, share.refs, strict=True)
            )

        start = tuple(jnp.zeros((len(rows), self.plan.outputs), jnp.float32) for _ in share.refs)
        return jax.lax.fori_loop(0, share.steps, step, start)

    def _column(self, index: jax.Array, share: Share) -> jax.Array:
        return (share.first + index * self.plan.chunks) * CHUNK + jnp.arange(self.plan.chunks * CHUNK, dtype=jnp.int32)

    def _rows(self, ref: Any, column: jax.Array, within: jax.Array, share: Share) -> jax.Array:
        return load(ref, (*share.at, share.output[:, None], column[None]), share.inside[:, None] & within[None])


def levels_of(weight: QTensor) -> jax.Array:
    """What codes stand for, f32 [16]; anything where they stand for themselves."""
    levels = weight.format.codes.levels
    return jnp.asarray(levels + (0.0,) * (16 - len(levels)), jnp.float32) if levels else weight.words


def by_byte_of_word(x: jax.Array, plan: ProductPlan) -> jax.Array:
    """x [T, in] as [4, T, words]: what the same byte of all words of a row multiplies lies together."""
    columns = plan.splits * plan.steps * plan.chunks * CHUNK
    padded = jnp.pad(x, ((0, 0), (0, columns - x.shape[1])))
    return padded.reshape(len(x), columns // 4, 4).transpose(2, 0, 1)


def by_column_of_chunk(x: jax.Array, plan: ProductPlan) -> jax.Array:
    """x [T, in] as [32, T, chunks]: what one column of all chunks multiplies lies together."""
    chunks = plan.splits * plan.steps * plan.chunks
    padded = jnp.pad(x, ((0, 0), (0, chunks * CHUNK - x.shape[1])))
    return padded.reshape(len(x), chunks, CHUNK).transpose(2, 0, 1)
