"""Quantisers of evenly spaced integers and of float8, symmetric about 0: what checkpoints call W8A16, W8A8, W4A16, FP8.

    scale = peak / (range / 2),  code = round(weight / scale)

with the largest magnitude of a row or group as peak, and 255, 15 or 896 as range. So the peak itself is cut off by half
a step where codes are integers. Source: the compressed-tensors package, quantization/utils/helpers.py and
lifecycle/forward.py (calculate_qparams, quantize).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Protocol

import numpy as np

from kernels.qtensor import Codes, RowFormat
from llmjax.errors import CheckpointError
from llmjax.quantization.rows import CODE_DTYPES, NUMBER_DTYPES, QuantizedRows

UNIT = 16  # group sizes of records are multiples of it
E4M3_MAX = 448.0


class UniformScheme(Protocol):
    """A way to quantise rows of a matrix, each by itself."""

    @property
    def name(self) -> str:
        """What users type."""

    @property
    def activations(self) -> str:
        """For `QTensor.activations`; ``auto``: as the engine is configured."""

    def format(self, size_in: int) -> RowFormat:
        """Of rows of `size_in` weights."""

    def quantize(self, rows: np.ndarray) -> QuantizedRows:
        """
        Args:
            rows: float [n, in], of f32, f16 or bf16.

        Raises:
            CheckpointError: a weight is infinite or not a number, or too large for the type of the scales.
        """


@dataclass(frozen=True)
class IntegerScheme:
    """Signed integers with a scale for each row (f32) or each group of columns (f16).

    Attributes:
        name, activations: see `UniformScheme`.
        bits: 4 or 8.
        group_size: columns that share a scale; 0: all.
    """

    name: str
    bits: int
    group_size: int = 0
    activations: str = "auto"

    def format(self, size_in: int) -> RowFormat:
        """See `UniformScheme`."""
        codes, zero = (Codes(8, "int"), 0) if self.bits == 8 else (Codes(self.bits), 1 << self.bits - 1)
        scale = "f16" if self.group_size else "f32"
        return RowFormat(
            size_in=size_in, codes=codes, group_size=_group_size(self.group_size, size_in), scale=scale, zero=zero
        )

    def quantize(self, rows: np.ndarray) -> QuantizedRows:
        """See `UniformScheme`."""
        form = self.format(rows.shape[1])
        half = 1 << self.bits - 1
        scales, quotients = _divided(rows, form, (2 * half - 1) / 2, self.name)
        np.rint(quotients, out=quotients)
        np.clip(quotients, -half, half - 1, out=quotients)
        quotients += np.float32(form.zero)
        return QuantizedRows(form, quotients.astype(CODE_DTYPES[form.codes.kind]), scales)


@dataclass(frozen=True)
class Float8Scheme:
    """E4M3 numbers with an f32 scale for each row."""

    name: str = "fp8"
    activations: str = "auto"

    def format(self, size_in: int) -> RowFormat:
        """See `UniformScheme`."""
        return RowFormat(size_in=size_in, codes=Codes(8, "e4m3"), group_size=_group_size(0, size_in), scale="f32")

    def quantize(self, rows: np.ndarray) -> QuantizedRows:
        """See `UniformScheme`."""
        form = self.format(rows.shape[1])
        scales, quotients = _divided(rows, form, E4M3_MAX, self.name)
        np.clip(quotients, -E4M3_MAX, E4M3_MAX, out=quotients)
        return QuantizedRows(form, _to_e4m3(quotients), scales)


SCHEMES: Mapping[str, UniformScheme] = MappingProxyType(
    {
        scheme.name: scheme
        for scheme in (
            IntegerScheme("int8", 8),
            IntegerScheme("int8_g128", 8, 128),
            IntegerScheme("w8a8", 8, activations="int8"),
            IntegerScheme("int4", 4, 128),
            IntegerScheme("int4_g64", 4, 64),
            Float8Scheme(),
        )
    }
)
"""By name."""


def _to_e4m3(numbers: np.ndarray) -> np.ndarray:
    """f32 up to E4M3_MAX rounded to nearest even, by a table: converting them one by one is several times slower."""
    words = numbers.view(np.uint32)
    # E4M3 has 4 bits less than the upper half has. So of the lower half it only matters whether it is 0.
    upper = words >> 16
    upper |= (words & 0xFFFF) != 0
    return _e4m3_of_upper_halves().take(upper).view(CODE_DTYPES["e4m3"])


@cache
def _e4m3_of_upper_halves() -> np.ndarray:
    """uint8 [65536], by the upper half of an f32."""
    numbers = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return np.clip(numbers, -E4M3_MAX, E4M3_MAX).astype(CODE_DTYPES["e4m3"]).view(np.uint8)


def _group_size(asked: int, size_in: int) -> int:
    return -(-min(asked or size_in, size_in) // UNIT) * UNIT


def _divided(rows: np.ndarray, form: RowFormat, reach: float, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Scales [n, groups] of the format's type that bring the peak of each group to `reach`, and rows / scale, f32."""
    size, columns = form.group_size, rows.shape[1]
    grouped: np.ndarray = np.zeros((len(rows), form.num_groups * size), np.float32)
    grouped[:, :columns] = rows
    grouped = grouped.reshape(len(rows), form.num_groups, size)
    peaks = np.maximum(grouped.max(axis=2), -grouped.min(axis=2))
    if not np.isfinite(peaks).all():
        raise CheckpointError(f"weights that are infinite or not a number cannot be quantised to {name}")
    dtype = NUMBER_DTYPES[form.scale]
    with np.errstate(over="ignore"):
        scales = (peaks / np.float32(reach)).astype(dtype)
    if not np.isfinite(scales).all():
        raise CheckpointError(f"weights up to {peaks.max():.3g} are too large for {name}: a scale would exceed {dtype}")
    scales[scales == 0] = np.finfo(dtype).eps  # any divisor gives zeros their code
    grouped /= scales.astype(np.float32)[:, :, None]
    return scales, grouped.reshape(len(rows), -1)[:, :columns]
