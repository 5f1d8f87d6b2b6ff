"""Quantizers to evenly spaced integers and to float8: W8A16, W8A8, W4A16 and FP8 in checkpoints.

Symmetric about 0:

    scale = peak / (range / 2),  code = round(weight / scale)

Here peak is the largest magnitude in a row or group, and range is 255, 15 or 896. So where codes are integers, the peak
itself is clipped by half a step. Integers may have a zero point instead, with 0 between least and most:

    scale = (most - least) / range,  zero = round(lowest code - least / scale),  code = round(weight / scale + zero)

Source: the compressed-tensors package, quantization/utils/helpers.py and lifecycle/forward.py (calculate_qparams,
quantize).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from llmjax.errors import CheckpointError
from llmjax.kernels.row_format import Codes, RowFormat
from llmjax.weights.rows import CODE_DTYPES, NUMBER_DTYPES, QuantizedRows

UNIT = 16  # group sizes of records are multiples of this
E4M3_MAX = 448.0


class UniformScheme(Protocol):
    """A scheme that quantizes each row of a matrix by itself."""

    @property
    def name(self) -> str:
        """The name that users type."""

    @property
    def activations(self) -> str:
        """The value of `QTensor.activations`; ``auto``: the engine's setting."""

    def format(self, size_in: int) -> RowFormat:
        """The format of rows of `size_in` weights."""

    def quantize(self, rows: np.ndarray) -> QuantizedRows:
        """
        Args:
            rows: float [n, in], of f32, f16 or bf16.

        Raises:
            CheckpointError: a weight is infinite or not a number, or too large for the type of the scales.
        """


@runtime_checkable
class PackedScheme(UniformScheme, Protocol):
    """A scheme that may pack the rows that it quantizes."""

    @property
    def packs(self) -> bool:
        """Whether it packs rows itself."""

    def fill(self, rows: np.ndarray, words: np.ndarray) -> None:
        """Packs rows into whole tiles, see ``llmjax.weights.packing.PackedRows.fill``; for the rest see `quantize`."""


@dataclass(frozen=True, eq=False)
class Grid:
    """The numbers that integer codes stand for: ``scale * (code - zero)`` with signed codes.

    Attributes:
        scales: [n, groups], in the type in which they are stored.
        zeros: f32 [n, groups], integers; None: all are 0.
    """

    scales: np.ndarray
    zeros: np.ndarray | None


@dataclass(frozen=True)
class IntegerScheme:
    """Integers with a scale for each row or each group of columns.

    Attributes:
        name, activations: see `UniformScheme`.
        bits: bits of a code, 4 or 8.
        group_size: number of columns that share a scale; 0: all.
        symmetric: whether zero is in the middle; else each scale has a zero point.
        scale: type of scales; empty: f16 for groups, f32 for rows.
    """

    name: str
    bits: int
    group_size: int = 0
    activations: str = "auto"
    symmetric: bool = True
    scale: str = ""

    def format(self, size_in: int) -> RowFormat:
        """See `UniformScheme`."""
        return RowFormat(
            size_in=size_in,
            codes=Codes(8, "int") if self.bits == 8 else Codes(self.bits),
            group_size=_group_size(self.group_size, size_in),
            scale=self._scale,
            zero=self._offset if self.symmetric else self._zero,
        )

    def quantize(self, rows: np.ndarray) -> QuantizedRows:
        """See `UniformScheme`."""
        grouped = _grouped(rows, self.format(rows.shape[1]))
        grid = self._grid(grouped)
        return self.rows(self._round(grouped, grid, rows.shape[1]), grid)

    def grid(self, rows: np.ndarray) -> Grid:
        """Fits a grid to rows.

        Args:
            rows: float [n, in].

        Raises:
            CheckpointError: see `UniformScheme.quantize`.
        """
        return self._grid(_grouped(rows, self.format(rows.shape[1])))

    def round(self, rows: np.ndarray, grid: Grid) -> np.ndarray:
        """Rounds float rows to the grid: signed codes, f32 [n, in]."""
        return self._round(_grouped(rows, self.format(rows.shape[1])), grid, rows.shape[1])

    def _grid(self, grouped: np.ndarray) -> Grid:
        half, number = 1 << self.bits - 1, self._scale
        if self.symmetric:
            return Grid(_scales(_peaks(grouped) / np.float32((2 * half - 1) / 2), number, self.name), None)
        # The range always includes 0, so the zeros that pad the last group do not change it.
        least, most = np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0)
        with np.errstate(over="ignore"):
            scales = _scales((most - least) / np.float32(2 * half - 1), number, self.name)
        zeros = np.float32(-half) - least / scales.astype(np.float32)
        return Grid(scales, np.rint(np.clip(zeros, -half, half - 1, out=zeros)))

    def _round(self, grouped: np.ndarray, grid: Grid, size_in: int) -> np.ndarray:
        """Works in place."""
        half = 1 << self.bits - 1
        grouped /= grid.scales.astype(np.float32)[:, :, None]
        if grid.zeros is not None:
            grouped += grid.zeros[:, :, None]
        np.rint(grouped, out=grouped)
        np.clip(grouped, -half, half - 1, out=grouped)
        return grouped.reshape(len(grouped), -1)[:, :size_in]

    def rows(self, codes: np.ndarray, grid: Grid) -> QuantizedRows:
        """Converts signed codes, f32 [n, in], to stored rows; `codes` is overwritten."""
        form = self.format(codes.shape[1])
        codes += np.float32(self._offset)
        zeros = grid.zeros
        if zeros is not None:
            zeros = (zeros + np.float32(self._offset)).astype(NUMBER_DTYPES[self._zero])
        return QuantizedRows(form, codes.astype(CODE_DTYPES[form.codes.kind]), grid.scales, zeros=zeros)

    @property
    def scale_dtype(self) -> np.dtype:
        """The dtype of scales."""
        return NUMBER_DTYPES[self._scale]

    @property
    def _scale(self) -> str:
        return self.scale or ("f16" if self.group_size else "f32")

    @property
    def _zero(self) -> str:
        """The type of zero points."""
        return "i8" if self.bits == 8 else "u8"

    @property
    def _offset(self) -> int:
        """The offset of stored codes from signed codes."""
        return 0 if self.bits == 8 else 1 << self.bits - 1


@dataclass(frozen=True)
class Float8Scheme:
    """E4M3 numbers with an f32 scale for each row.

    Attributes:
        name, activations: see `UniformScheme`.
        per_tensor: whether all rows that are quantized together share a scale.
    """

    name: str = "fp8"
    activations: str = "auto"
    per_tensor: bool = False

    def format(self, size_in: int) -> RowFormat:
        """See `UniformScheme`."""
        return RowFormat(size_in=size_in, codes=Codes(8, "e4m3"), group_size=_group_size(0, size_in), scale="f32")

    def quantize(self, rows: np.ndarray) -> QuantizedRows:
        """See `UniformScheme`."""
        form = self.format(rows.shape[1])
        grouped = _grouped(rows, form)
        peaks = _peaks(grouped)
        if self.per_tensor:
            peaks = np.full_like(peaks, peaks.max())
        scales = _scales(peaks / np.float32(E4M3_MAX), form.scale, self.name)
        grouped /= scales[:, :, None]
        np.clip(grouped, -E4M3_MAX, E4M3_MAX, out=grouped)
        return QuantizedRows(form, _to_e4m3(grouped.reshape(len(rows), -1)[:, : rows.shape[1]]), scales)


UNIFORM_SCHEMES: Mapping[str, IntegerScheme | Float8Scheme] = MappingProxyType(
    {
        scheme.name: scheme
        for scheme in (
            IntegerScheme("int8", 8),
            IntegerScheme("int8_g128", 8, 128),
            IntegerScheme("w8a8", 8, activations="int8"),
            IntegerScheme("int4", 4, 128),
            IntegerScheme("int4_g64", 4, 64),
            IntegerScheme("int4_asym", 4, 128, symmetric=False),
            Float8Scheme(),
        )
    }
)
"""Schemes by name that quantize each row by itself, so that rows can be quantized while they are read."""

SAVED_SCHEMES: Mapping[str, IntegerScheme | Float8Scheme] = MappingProxyType(
    {**UNIFORM_SCHEMES, "fp8_tensor": Float8Scheme("fp8_tensor", per_tensor=True)}
)
"""Schemes by name that safetensors files can hold."""


def _to_e4m3(numbers: np.ndarray) -> np.ndarray:
    """Rounds f32 up to E4M3_MAX to nearest even with a table: converting numbers one by one is several times slower."""
    words = numbers.view(np.uint32)
    # E4M3 has 4 bits fewer than the upper half, so it only matters whether the lower half is 0.
    upper = words >> 16
    upper |= (words & 0xFFFF) != 0
    return _e4m3_of_upper_halves().take(upper).view(CODE_DTYPES["e4m3"])


@cache
def _e4m3_of_upper_halves() -> np.ndarray:
    """The E4M3 code for each upper half of an f32, uint8 [65536]."""
    numbers = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return np.clip(numbers, -E4M3_MAX, E4M3_MAX).astype(CODE_DTYPES["e4m3"]).view(np.uint8)


def _group_size(asked: int, size_in: int) -> int:
    return -(-min(asked or size_in, size_in) // UNIT) * UNIT


def _grouped(rows: np.ndarray, form: RowFormat) -> np.ndarray:
    """Rows as f32 [n, groups, columns], the last group padded with zeros."""
    grouped: np.ndarray = np.zeros((len(rows), form.num_groups * form.group_size), np.float32)
    grouped[:, : rows.shape[1]] = rows
    return grouped.reshape(len(rows), form.num_groups, form.group_size)


def _peaks(grouped: np.ndarray) -> np.ndarray:
    """The largest magnitude of each group, f32 [n, groups]."""
    peaks: np.ndarray = np.maximum(grouped.max(axis=2), -grouped.min(axis=2))
    return peaks


def _scales(steps: np.ndarray, number: str, name: str) -> np.ndarray:
    """Converts steps, f32 [n, groups], to the type of scales."""
    if not np.isfinite(steps).all():
        raise CheckpointError(f"weights that are infinite or not a number cannot be quantized to {name}")
    dtype = NUMBER_DTYPES[number]
    with np.errstate(over="ignore"):
        scales = steps.astype(dtype)
    if not np.isfinite(scales).all():
        raise CheckpointError(f"weights are too large for {name}: a scale would be {steps.max():.3g}, beyond {dtype}")
    scales[scales == 0] = ml_dtypes.finfo(dtype).eps  # groups of zeros: any divisor gives the code of 0
    return scales
