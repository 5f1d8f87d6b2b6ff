"""Products with records on tensor cores: codes become bf16 fragments in registers.

What a code stands for is exact in bf16, so that scales multiply the f32 sums of each group and nothing but x is
rounded (Marlin, arXiv:2408.11743, multiplies weights by them). A word of four rows is one load of a thread: its bytes
and pieces are eight depths of a fragment, in an order that x is brought into once, so that no code ever moves between
threads. A code costs a shift and a mask, and half of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.cuda.lowering import power_of_2
from llmjax.kernels.cuda.plan import ENOUGH_PROGRAMS
from llmjax.kernels.cuda.records import E2M1, Line, weight_line
from llmjax.kernels.cuda.threads import THREADS, WARPS, Threads, launch, refuses_card
from llmjax.kernels.cuda.tuned import Key, tuned
from llmjax.kernels.qtensor import CUDA_TILE, QTensor
from llmjax.kernels.row_format import CHUNK, PLANES, RowFormat

STEP = 4  # chunks that a warp multiplies at a time
COLUMN_ROWS = 8  # of x, that a product of tensor cores takes
MOST_ROWS = 64  # of x, that a program takes: sums fill half of the registers
HALF_CHUNK = CHUNK // 2  # depth of a product
MANTISSA = 7  # bits


def refuses(weight: QTensor) -> str | None:
    """Why the kernel does not take a matrix; None: it does."""
    codes = weight.format.codes
    if weight.words.size >= 1 << 31:
        return "indices of words have 31 bits"
    if weight.dtype != jnp.bfloat16:
        return f"weights are {weight.dtype}"
    if codes.levels and codes.levels != E2M1:
        return "codes have levels of their own"
    if codes.kind == "e5m2":
        return "codes are e5m2"
    return refuses_card()


@dataclass(frozen=True)
class FragmentPlan:
    """How a product is divided.

    Args:
        rows: rows of x that a program takes, a multiple of 8.
        tiles: tiles of the matrix that it takes, of 32 rows each: 1, 2 or 4; the warps of a tile share its columns.
        splits: programs that share the columns.
    """

    rows: int
    tiles: int
    splits: int

    @classmethod
    def of(cls, rows: int, *, size_out: int, chunks: int) -> FragmentPlan:
        """The division for ``rows`` rows of x, by arithmetic.

        The fewer rows, the more warps share a tile, which fills a card without splits; with many, x is read less often
        where each warp has a tile of its own.

        Args:
            size_out: rows of the matrix.
            chunks: chunks of a row of the matrix.
        """
        block = min(MOST_ROWS, -(-rows // COLUMN_ROWS) * COLUMN_ROWS)
        tiles = 1 if block <= 16 else 2 if block <= 32 else 4
        programs = -(-size_out // (tiles * CUDA_TILE)) * -(-rows // block)
        most = -(-chunks * tiles // (STEP * WARPS))  # with more, some would have nothing to do
        return cls(block, tiles, min(most, power_of_2(-(-ENOUGH_PROGRAMS // programs))))

    def changed(self, choice: Mapping[str, int], chunks: int) -> FragmentPlan:
        """The same with other values of some fields."""
        return replace(self, **choice)

    def tuned(self, key: Key, chunks: int) -> FragmentPlan:
        """The same as it was measured on this machine's card."""
        return tuned(self, key)


def product(x: jax.Array, weight: QTensor, plan: FragmentPlan, *, interpret: bool) -> jax.Array:
    """``x @ weight.T``, f32 [T, out].

    Args:
        x: [T, in]; rounded to bf16.
        weight: a single matrix that `refuses` does not refuse.
        interpret: run as XLA operations on any device.
    """
    padded = jnp.pad(x, ((0, -len(x) % plan.rows), (0, 0)))
    (out,) = products(padded, [replace(weight, words=weight.words[None])], None, plan, interpret=interpret)
    return out[: len(x)]


def products(
    x: jax.Array, stacks: Sequence[QTensor], matrix: jax.Array | None, plan: FragmentPlan, *, interpret: bool
) -> list[jax.Array]:
    """Blocks of rows of x with a matrix of each stack, f32 [blocks * plan.rows, out] for each.

    Args:
        x: [blocks * plan.rows, in]; rounded to bf16.
        stacks: stacks of matrices of one format, which `refuses` does not refuse.
        matrix: i32 [blocks], which of a stack; where negative, nothing is computed and sums are zero. None: the first.
        interpret: run as XLA operations on any device.
    """
    form, (_, tiles, num_words, _) = stacks[0].format, stacks[0].words.shape
    kernel = _Kernel(form, plan, tiles, num_words, len(x), Threads(interpret), matrix is not None)
    # Columns end with a step of zeros, whatever the plan: products that read one x have what is made of it in common.
    columns = (kernel.num_steps + 1) * STEP * CHUNK
    x = jnp.pad(x.astype(jnp.bfloat16), ((0, 0), (0, columns - x.shape[1])))
    arguments = [_as_fragments(x)]
    if kernel.shifts:
        arguments.append(_sums_of_runs(x, kernel.run * HALF_CHUNK))
    if matrix is not None:
        arguments.append(matrix)
    results = []
    for stack in stacks:
        out = launch(
            "fragments",
            kernel,
            jax.ShapeDtypeStruct((plan.splits * len(x) * tiles * CUDA_TILE,), jnp.float32),
            [stack.words.reshape(-1), *arguments],
            grid=(-(-tiles // plan.tiles), plan.splits, len(x) // plan.rows),
            shared=kernel.shared,
            interpret=interpret,
        )
        sums = out.reshape(plan.splits, len(x), -1)[:, :, : stack.size_out]
        results.append(sums.sum(0) if plan.splits > 1 else sums[0])
    return results


def subtracted(form: RowFormat) -> int:
    """What codes that are read as mantissas have too much, zero points included, where it is one number for the whole
    matrix and all they have: then it is subtracted from pairs of them, exactly. 0: sums have it taken off."""
    codes = form.codes
    mantissas = codes.kind == "uint" and not codes.levels
    one = isinstance(form.zero, int) and form.zero <= 1 << codes.bits and not form.minimum
    return (1 << codes.bits) + int(form.zero) if mantissas and one else 0


def fragment_line(form: RowFormat) -> Line:
    """What the numbers in fragments stand for, zero points apart."""
    if subtracted(form):
        return Line(1.0, float(form.zero))
    return Line(1.0, 0.0 if form.codes.kind != "uint" or form.codes.levels else -float(1 << form.codes.bits))


def _as_fragments(x: jax.Array) -> jax.Array:
    """x, bf16 [T, in], as quads of two each, for each eight rows, each chunk and each lane; T and in are multiples."""
    # Column 16 * s + 4 * c + b is of lane 4 * g + c, step s; bytes 0 and 2 of a word are masked together, and 1 and 3.
    x = x.reshape(-1, COLUMN_ROWS, x.shape[1] // CHUNK, 2, 4, 2, 2)  # tile, g, chunk, s, c, half, low or high
    return x.transpose(0, 2, 1, 4, 3, 6, 5).reshape(-1)


def _sums_of_runs(x: jax.Array, run: int) -> jax.Array:
    """Sums of runs of columns, f32 quads for each eight rows, each run and each c: of rows ``2 * c``, ``2 * c + 1``."""
    sums = x.reshape(len(x), -1, run).sum(-1, dtype=jnp.float32)
    quads = sums.reshape(-1, 4, 2, sums.shape[1]).transpose(0, 3, 1, 2)
    return jnp.pad(quads, ((0, 0), (0, 0), (0, 0), (0, 2))).reshape(-1)


@dataclass(frozen=True)
class _Records:
    """Four records of each thread, as `records.weight_line` reads them."""

    threads: Threads
    words: Any  # reference, u32
    base: jax.Array  # i32 quads, where the first word of the first record lies
    chunk: jax.Array  # i32 quads

    def read(self, word: jax.Array, further: int = 0) -> jax.Array:
        return self.threads.load(self.words, self.base + word * CUDA_TILE, further * CUDA_TILE)

    def beside(self, number: jax.Array) -> jax.Array:
        return number


@dataclass(frozen=True)
class _Kernel:
    form: RowFormat
    plan: FragmentPlan
    tiles: int
    num_words: int
    num_rows: int  # of x
    threads: Threads
    stacked: bool  # the matrix of each block of rows is one of a stack

    @property
    def num_steps(self) -> int:
        """Steps over a row of the matrix."""
        return -(-self.form.num_chunks // STEP)

    @property
    def run(self) -> int:
        """Products, of 16 columns each, whose sums have their scale in common."""
        size = STEP * CHUNK if self.form.num_groups == 1 else math.gcd(STEP * CHUNK, self.form.group_size)
        return size // HALF_CHUNK

    @property
    def shifts(self) -> bool:
        """Whether weights are more than a number times a scale."""
        return not subtracted(self.form) and bool(
            fragment_line(self.form).offset or self.form.zero or self.form.minimum
        )

    @property
    def parts(self) -> int:
        """Warps that share a tile of the matrix."""
        return WARPS // self.plan.tiles

    @property
    def num_sums(self) -> int:
        """Quads of sums of a thread."""
        return 2 * self.plan.rows // COLUMN_ROWS

    @property
    def shared(self) -> int:
        return 0 if self.parts == 1 else 4 * THREADS * self.num_sums

    def __call__(self, place: Sequence[jax.Array], words: Any, x: Any, *refs: Any) -> None:
        """words: u32; x: from `_as_fragments`; then, where there are such, from `_sums_of_runs`, and the matrices of
        blocks, i32; out: f32 [splits * T * out]; shared memory."""
        sums_of_x, refs = (refs[0], refs[1:]) if self.shifts else (None, refs)
        matrix, refs = (refs[0][place[2]], refs[1:]) if self.stacked else (np.int32(0), refs)
        threads, plan, column_tiles = self.threads, self.plan, self.plan.rows // COLUMN_ROWS
        thread = threads.index()
        lane, warp = thread & 31, thread >> 5
        g, c = lane >> 2, lane & 3
        tile = jnp.minimum(place[0] * plan.tiles + (warp & (plan.tiles - 1)), self.tiles - 1)
        part = jax.lax.div(warp, np.int32(plan.tiles))
        steps = -(-self.num_steps // (plan.splits * self.parts))
        first = place[1] * (steps * self.parts) + part
        base = (jnp.maximum(matrix, 0) * self.tiles + tile) * (self.num_words * CUDA_TILE) + 4 * g
        column_tile = place[2] * column_tiles
        runs = 2 * STEP // self.run  # of a step

        def fetch(index: Any) -> tuple[Any, Any]:
            here = jnp.minimum(first + index * self.parts, self.num_steps - 1)  # after the row, what multiplies zeros
            return self._fetch(_Records(threads, words, base, here * STEP), c)

        def step(index: jax.Array, state: Any) -> Any:
            codes, lines, sums = state
            ahead = fetch(index + 1)
            here = jnp.minimum(first + index * self.parts, self.num_steps)  # after the row there are zeros
            start = column_tile * (self.num_steps + 1) + here  # of the steps of all column tiles
            x_at, sums_at = start * (STEP * 256) + 8 * lane, start * (runs * 16) + 4 * c
            totals = [threads.constant(0.0)] * self.num_sums
            for number, s in itertools.product(range(STEP), range(2)):
                low, high = (self._pair(codes[number], s, odd) for odd in (0, 1))
                for i in range(column_tiles):
                    inputs = threads.load(x, x_at, (i * (self.num_steps + 1) * STEP + number) * 256)
                    totals[2 * i : 2 * i + 2] = threads.multiply(totals[2 * i : 2 * i + 2], low, high, inputs, s)
                run, behind = divmod(2 * number + s + 1, self.run)
                if behind:
                    continue
                gain, shift = lines[run - 1]
                sums = [total + gain * each for total, each in zip(sums, totals, strict=True)]
                totals = [threads.constant(0.0)] * self.num_sums
                for i in range(column_tiles if self.shifts else 0):
                    further = (i * (self.num_steps + 1) * runs + run - 1) * 16
                    inputs = threads.load(sums_of_x, sums_at, further)
                    for j in (0, 1):
                        sums[2 * i + j] = sums[2 * i + j] + shift * threads.spread(inputs, j)
            return *ahead, sums

        state = (*fetch(0), [threads.constant(0.0)] * self.num_sums)
        *_, sums = jax.lax.fori_loop(0, jnp.where(matrix < 0, 0, steps) if self.stacked else steps, step, state)
        self._write(place, refs, sums, thread=thread, tile=tile, part=part)

    def _fetch(self, records: _Records, c: jax.Array) -> tuple[Any, Any]:
        """Words of the codes and lines of the runs of a step; after the row, those of its last chunk."""
        form, bits = self.form, self.form.codes.bits
        whole = form.num_chunks % STEP == 0
        chunks = [records.chunk + i for i in range(STEP)]
        if not whole:
            chunks = [jnp.minimum(chunk, form.num_chunks - 1) for chunk in chunks]
        codes = []
        for number, chunk in enumerate(chunks):
            start, further = (records.chunk * bits, number * bits) if whole else (chunk * bits, 0)
            if bits == 8:
                codes.append([records.read(start + c, further + 4 * s) for s in (0, 1)])
                continue
            planes, low = [], 0
            for width in PLANES[bits]:  # the pieces of lane 4 * g + c are brought where those of c = 0 lie
                word = records.read(start + (c & (width - 1)), further + low)
                planes.append(word if width == 4 else word >> (c & (4 - width)).astype(jnp.uint32))
                low += width
            codes.append(planes)
        lines = []
        for run in range(0, 2 * STEP, self.run):
            place = replace(records, chunk=chunks[run // 2])
            lines.append(weight_line(place, form, run % 2, line=fragment_line(form)))
        return codes, lines if self.shifts else [(gain, gain) for gain, _ in lines]

    def _pair(self, words: list[jax.Array], s: int, odd: int) -> jax.Array:
        """Two numbers of each record's `fragment_line` as bf16: columns ``16 * s + 4 * c + odd`` and two further."""
        codes = self.form.codes
        if codes.kind == "int":  # the seven low bits, and -128 or, by the highest, -256
            word = words[s] >> np.uint32(8 * odd)
            low, high = word & _both(0x7F) | _both(0x4300), word & _both(0x80) | _both(0xC300)
            return self.threads.add(low, high)
        if codes.kind == "e4m3":
            word = words[s]
            sign, rest = _shifted(word, 8 - 8 * odd, 0x8000), _shifted(word, 4 - 8 * odd, 0x7F0)
            return self.threads.scale(sign | rest, 120)
        at = 8 * odd + 4 * s
        if codes.levels:  # E2M1
            sign, rest = _shifted(words[0], 12 - at, 0x8000), _shifted(words[0], 6 - at, 0x1C0)
            return self.threads.scale(sign | rest, 126)
        pair: Any = _both((127 + codes.bits) << MANTISSA)
        low = MANTISSA - codes.bits
        for word, width in zip(words, PLANES[codes.bits], strict=True):
            pair = _shifted(word, low - at, ((1 << width) - 1) << low) | pair
            low += width
        much = subtracted(self.form)
        return self.threads.add(pair, -float(much)) if much else pair

    def _write(
        self, place: Sequence[jax.Array], refs: Any, sums: list[jax.Array], *, thread: Any, tile: Any, part: Any
    ) -> None:
        """Sums of all warps that share a tile, each of which writes some."""
        out, threads = refs[0], self.threads
        lane = thread & 31
        g, c = lane >> 2, lane & 3
        row = place[1] * self.num_rows + place[2] * self.plan.rows
        if self.parts == 1:
            shares: Any = enumerate(sums)
        else:
            for place_of_sum, quads in enumerate(sums):
                threads.store(refs[1], (thread + place_of_sum * THREADS) * 4, quads)
            threads.wait()
            shares = self._added(refs[1], thread=thread, part=part)
        for number, quads in shares:
            at = row + (number >> 1) * COLUMN_ROWS + 2 * c + (number & 1)
            threads.store(out, at * (self.tiles * CUDA_TILE) + tile * CUDA_TILE + 4 * g, quads)

    def _added(self, shared: Any, *, thread: jax.Array, part: jax.Array) -> Iterator[tuple[jax.Array, jax.Array]]:
        """The sums over the warps of a tile that a warp writes: which, and the quads."""
        each = THREADS // self.parts  # threads of a part
        beside = thread - part * each  # that of the first part
        for first in range(0, self.num_sums, self.parts):
            number = jnp.minimum(part + first, self.num_sums - 1)
            quads = self.threads.constant(0.0)
            for other in range(self.parts):
                quads = quads + self.threads.load(shared, (beside + other * each + number * THREADS) * 4)
            yield number, quads


def _both(half: int) -> np.uint32:
    """In both halves of a word."""
    return np.uint32(half << 16 | half)


def _shifted(word: jax.Array, left: int, mask: int) -> jax.Array:
    """The bits of a mask, in both halves, of a word that is shifted."""
    return (word << np.uint32(left) if left >= 0 else word >> np.uint32(-left)) & _both(mask)
