"""Weights of one byte each, int8 or float8, times scales for the tensor, its rows, groups of columns or blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from llmjax.checkpoint.formats.layout import Layout, StoredRows, scale_type
from llmjax.checkpoint.formats.quantized import Module
from llmjax.checkpoint.safetensors import DTYPES
from llmjax.kernels.qtensor import Codes

FLOAT8 = ("F8_E4M3", "F8_E5M2")
ONE_BYTE = frozenset({"I8", *FLOAT8})
CODES: Mapping[np.dtype, Codes] = MappingProxyType(
    {
        DTYPES["I8"]: Codes(8, "int"),
        DTYPES["F8_E4M3"]: Codes(8, "e4m3"),
        DTYPES["F8_E5M2"]: Codes(8, "e5m2"),
    }
)
"""By the weight's dtype."""


@dataclass(frozen=True, eq=False)
class ScaledPlanes:
    """weight[o, i] = (value[o, i] - zero) * scale, both of block (o // block_rows, i // block_columns).

    Attributes:
        weight: int8 or float8 [out, in].
        scales: floats [ceil(out / block_rows), ceil(in / block_columns)].
        zeros: int8 of the same shape, or None.
        block_rows, block_columns: outputs and inputs that share a scale.
    """

    weight: np.ndarray
    scales: np.ndarray
    block_rows: int
    block_columns: int
    zeros: np.ndarray | None = None

    row_step = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def layout(self) -> Layout:
        return Layout(
            size_in=self.shape[1],
            codes=CODES[self.weight.dtype],
            group_size=self.block_columns,
            scale=scale_type(self.scales.dtype),
            zero=0 if self.zeros is None else "i8",
        )

    def rows(self, start: int, stop: int) -> StoredRows:
        blocks = np.arange(start, stop) // self.block_rows
        return StoredRows(
            codes=self.weight[start:stop],
            scales=self.scales[blocks],
            zeros=None if self.zeros is None else self.zeros[blocks],
        )


def as_matrix(scales: np.ndarray) -> np.ndarray:
    """Scales for a tensor, [] or [1], as [1, 1], and those for rows, [out], as [out, 1]."""
    return scales if scales.ndim == 2 else scales.reshape(-1, 1)


def open_scaled(
    module: Module, scale_part: str, *, types: Collection[str], block: tuple[int, int] | None = None
) -> ScaledPlanes:
    """Planes of ``.weight`` and its scales.

    Args:
        module: the layer.
        scale_part: where the scales are; their shape says what they are for: [] and [1] for the tensor, [out] and
            [out, 1] for rows, [out, groups] for equal groups of columns, else one for each `block`.
        types: allowed types of the weight.
        block: rows and columns of a block.

    Raises:
        CheckpointError: a tensor is missing or malformed, or the scales have another shape.
    """
    weight = module.array(".weight", *types, dims=2)
    scales = module.scales(scale_part)
    outputs, inputs = weight.shape
    if block is not None:
        needed = (-(-outputs // block[0]), -(-inputs // block[1]))
        module.expect(scale_part, needed, f"{outputs} x {inputs} in blocks of {block[0]} x {block[1]}")
        return ScaledPlanes(weight, scales, *block)
    matrix = as_matrix(scales)
    if matrix.size == 1:
        return ScaledPlanes(weight, matrix, outputs, inputs)
    columns = matrix.shape[1]
    if scales.ndim > 2 or len(matrix) != outputs or inputs % columns:
        module.fail(
            f"has shape {list(scales.shape)}, which is no scale for a tensor, rows or groups of {outputs} x {inputs}",
            scale_part,
        )
    return ScaledPlanes(weight, matrix, 1, inputs // columns)
