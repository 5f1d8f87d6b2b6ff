"""Rows of a quantized matrix as NumPy arrays: the output of every file format and quantizer, and the input of packing.

`QuantizedRows.dequantize` defines the weights that they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import ml_dtypes
import numpy as np

from llmjax.kernels.cpu.cores import usable_cores
from llmjax.kernels.row_format import CHUNK, PLANES, RowFormat

NUMBER_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "f32": np.dtype("<f4"),
        "f16": np.dtype("<f2"),
        "bf16": np.dtype(ml_dtypes.bfloat16),
        "i16": np.dtype("<i2"),
        "u8": np.dtype("u1"),
        "i8": np.dtype("i1"),
        "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
        "e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
    }
)
"""NumPy dtypes by the number type of a `RowFormat`."""

FLOATS: Mapping[str, np.dtype] = MappingProxyType({name: NUMBER_DTYPES[name] for name in ("f32", "f16", "bf16")})
"""Types of weights that are not quantized."""

CODE_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "uint": np.dtype("u1"),
        "int": np.dtype("i1"),
        "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
        "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    }
)

E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers that codes of a 4-bit float stand for (OCP Microscaling Formats 1.0)."""


NUMPY_THREADS = 2


def numpy_threads() -> int:
    """The number of threads that quantize or pack with NumPy; more would wait for the interpreter lock."""
    return min(NUMPY_THREADS, usable_cores())


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Rows of a matrix: weight = scale * (number(code) - zero) - minimum, see `llmjax.kernels.row_format`.

    Every array has the dtype that the format says (NUMBER_DTYPES, CODE_DTYPES); arrays that it lacks are None.

    Attributes:
        format: the format of each row.
        codes: [n, in].
        scales: [n, groups].
        zeros: [n, groups].
        minima: [n, groups].
        super_scales, super_minima: [n, super groups].
    """

    format: RowFormat
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    minima: np.ndarray | None = None
    super_scales: np.ndarray | None = None
    super_minima: np.ndarray | None = None

    def dequantize(self, out: np.ndarray) -> None:
        """Fills f32 [n, in]; every step is one rounded f32 operation."""
        form = self.format
        levels = form.codes.levels
        out[...] = np.array(levels, np.float32).take(self.codes) if levels else self.codes
        if self.zeros is not None:
            self._by_group(np.subtract, out, self.zeros.astype(np.float32))
        elif form.zero:
            out -= np.float32(form.zero)
        self._by_group(np.multiply, out, self._scaled(self.scales, self.super_scales))
        if self.minima is not None:
            self._by_group(np.subtract, out, self._scaled(self.minima, self.super_minima))

    def write(self, records: np.ndarray) -> None:
        """Fills the records of the rows.

        Args:
            records: u32 [n, words of a record].
        """
        form = self.format
        bits, chunks = form.codes.bits, form.num_chunks
        self._write_codes(records[:, : chunks * bits].reshape(len(records), chunks, bits))
        for name, entry in form.fields.items():
            dtype = NUMBER_DTYPES[entry.number]
            padded = np.zeros((len(records), entry.num_words * 4 // dtype.itemsize), dtype)
            padded[:, : entry.count] = getattr(self, name)
            records[:, entry.start : entry.start + entry.num_words] = padded.view("<u4")

    def _write_codes(self, words: np.ndarray) -> None:
        """Fills u32 [n, chunks, bits]."""
        rows, chunks, bits = words.shape
        codes = np.ascontiguousarray(self.codes).view(np.uint8)
        if missing := chunks * CHUNK - codes.shape[1]:
            codes = np.pad(codes, ((0, 0), (0, missing)))
        low = 0
        for width in PLANES[bits]:
            plane = _plane(codes.reshape(-1, CHUNK), low, width, last=low + width == bits)
            plane = plane.reshape(rows, chunks, width)
            if width == bits:
                words[...] = plane
            else:
                for index in range(width):  # long inner loops, as in `_plane`
                    words[:, :, low + index] = plane[:, :, index]
            low += width

    @property
    def finite(self) -> bool:
        """Whether all scales and minima are finite."""
        return all(bool(np.isfinite(getattr(self, name)).all()) for name in self.format.fields)

    def _scaled(self, values: np.ndarray, above: np.ndarray | None) -> np.ndarray:
        values = values.astype(np.float32)
        if above is None:
            return values
        return values * _spread(above.astype(np.float32), self.format.super_size // self.format.group_size, values)

    def _by_group(self, operation: np.ufunc, out: np.ndarray, values: np.ndarray) -> None:
        size = self.format.group_size
        if out.shape[1] % size == 0:
            grouped = out.reshape(len(out), -1, size)
            operation(grouped, values[:, :, None], out=grouped)
        else:
            operation(out, _spread(values, size, out), out=out)


def _plane(codes: np.ndarray, low: int, width: int, *, last: bool) -> np.ndarray:
    """Bits `low` to `low + width` of codes as a plane of words, see `llmjax.kernels.row_format`.

    It works on words of several codes at once, which is correct because no bit leaves its byte.

    Args:
        codes: uint8 [n, CHUNK].
        last: whether the codes have no higher bits.

    Returns:
        u32 [n, width].
    """
    if width == 8:
        return codes.view(np.uint32)
    stored = codes.view(np.uint64)
    if low or not last:
        stored = stored & np.frombuffer(bytes([(1 << width) - 1 << low] * 8), np.uint64)
    pieces = 1 if width > 1 else 2  # pieces that a word holds side by side
    stored = stored.reshape(len(codes), 8 // width // pieces, -1)
    plane = np.zeros((len(codes), stored.shape[2]), np.uint64)
    for step in range(stored.shape[1]):
        shift = width * pieces * step - low
        for index in range(stored.shape[2]):  # one word of every chunk at a time, so that inner loops are long
            part = stored[:, step, index]
            plane[:, index] |= part << np.uint64(shift) if shift >= 0 else part >> np.uint64(-shift)
    words = plane.view(np.uint32)
    return words if width > 1 else words[:, :1] | words[:, 1:] << 1


def _spread(values: np.ndarray, size: int, like: np.ndarray) -> np.ndarray:
    """Repeats each value `size` times, up to the number of columns of `like`."""
    return values.repeat(size, axis=1)[:, : like.shape[1]]
