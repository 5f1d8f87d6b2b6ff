"""How a product with a matrix, or with one of a stack, is divided among programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmjax.kernels.cuda.lowering import MIN_DOT, power_of_2
from llmjax.kernels.cuda.tuned import Key, tuned
from llmjax.kernels.qtensor import CUDA_TILE
from llmjax.kernels.row_format import Codes

# Sizes that fill a card by arithmetic; `python -m benchmarks.tune_gpu` measures them.
MAX_VECTOR_ROWS = 2  # with more, tensor cores; code and compile time grow with the rows
ENOUGH_PROGRAMS = 192


@dataclass(frozen=True)
class ProductPlan:
    """How a product is divided.

    Args:
        rows: rows of x that a program takes.
        outputs: rows of the matrix that a program takes; with records, a multiple of the tile.
        chunks: chunks of 32 columns that it reads at a time.
        steps: how often it reads that many.
        splits: programs that share the columns.
        warps: warps of a program.
        stages: stages of its loop's software pipeline.
    """

    rows: int
    outputs: int
    chunks: int
    steps: int
    splits: int
    warps: int
    stages: int = 2

    @classmethod
    def of_records(
        cls,
        rows: int,
        blocks: int,
        *,
        size_out: int,
        chunks: int,
        codes: Codes,
        matrices: int = 1,
        depth: int = MIN_DOT,
    ) -> ProductPlan:
        """For a matrix of records.

        Args:
            rows: rows of x that a program takes.
            blocks: how many blocks of ``rows`` rows there are.
            size_out: rows of the matrix.
            chunks: chunks of a row of the matrix.
            codes: the matrix's codes.
            matrices: matrices that a program reads side by side.
            depth: columns of the smallest product, counted in chunks.
        """
        few = rows <= MAX_VECTOR_ROWS
        outputs = CUDA_TILE if few or matrices > 1 else 2 * CUDA_TILE
        programs = -(-size_out // outputs) * blocks
        at_a_time = min(64 if few else 32, max(depth, power_of_2(chunks)))
        while at_a_time > depth and programs * -(-chunks // at_a_time) < ENOUGH_PROGRAMS:
            at_a_time //= 2  # a small matrix is read by more programs, each with less of it
        warps = min(8, at_a_time // 4) if few else 4
        # Pipelined, what codes stand for would be fetched into shared memory, several times the words' size.
        stages = 1 if codes.levels and not few else 2
        return cls(rows, outputs, at_a_time, 0, 1, warps, stages).split(chunks, programs)

    @classmethod
    def of_floats(cls, rows: int, blocks: int, *, size_out: int, chunks: int, itemsize: int) -> ProductPlan:
        """For a plain matrix whose elements have ``itemsize`` bytes; the other arguments as in `of_records`."""
        if rows <= MAX_VECTOR_ROWS:  # 16 bytes for each of 128 threads four times: what is on its way hides the latency
            outputs, at_a_time, stages = 8, min(max(1, 32 // itemsize), power_of_2(chunks)), 2
        else:
            outputs, at_a_time, stages = 64, max(1, 4 // itemsize), 3
        return cls(rows, outputs, at_a_time, 0, 1, 4, stages).split(chunks, -(-size_out // outputs) * blocks)

    def split(self, chunks: int, programs: int) -> ProductPlan:
        """The same with a row's chunks shared by as many programs as fill a card.

        Args:
            programs: how many programs there are without splits.
        """
        steps = -(-chunks // self.chunks)
        splits = min(steps, power_of_2(-(-ENOUGH_PROGRAMS // programs)))
        return self.with_splits(splits, chunks)

    def with_splits(self, splits: int, chunks: int) -> ProductPlan:
        """The same with a row's chunks shared by ``splits`` programs."""
        steps = -(-chunks // (self.chunks * splits))
        return replace(self, steps=steps, splits=splits)

    def changed(self, choice: Mapping[str, int], chunks: int) -> ProductPlan:
        """The same with other values of some fields, for rows of ``chunks`` chunks."""
        plan = replace(self, **choice)
        return plan.with_splits(plan.splits, chunks)

    def tuned(self, key: Key, chunks: int) -> ProductPlan:
        """The same as it was measured on this machine's card, for rows of ``chunks`` chunks."""
        plan = tuned(self, key)
        return plan.with_splits(plan.splits, chunks)
