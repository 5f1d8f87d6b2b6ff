"""ggml's reference quantisers without a search: q4_0 to q8_0, mxfp4 and the ternary types.

Each function fills structured blocks [n] (layouts: `ggml.GGML_TYPES`) from f32 [n, elems], bit for bit as
``quantize_row_*_ref`` of ggml-quants.c: codes are formed with the f32 reciprocal of the scale before the scale is
rounded to f16. Numbers stand in columns, so that what is per block runs over contiguous memory.
"""

from __future__ import annotations

import numpy as np

from llmjax.weights.ggml.reference_search import columns, largest
from llmjax.weights.ggml.simple import FP4_DOUBLED

CODE_OF_HALVES = np.searchsorted((FP4_DOUBLED[:7] + FP4_DOUBLED[1:8]) / 2, np.arange(33) / 2).astype(np.uint8)
"""uint8 [33]: code of a magnitude in (h/2 - 1/2, h/2] by h, in halves of the scale; the lower of two as near."""


def quantise_q4_0(weights: np.ndarray, blocks: np.ndarray) -> None:
    store_nibbles(_symmetric(weights, blocks, 8), blocks)


def quantise_q4_1(weights: np.ndarray, blocks: np.ndarray) -> None:
    store_nibbles(_from_minimum(weights, blocks, 15), blocks)


def quantise_q5_0(weights: np.ndarray, blocks: np.ndarray) -> None:
    _store_five_bits(_symmetric(weights, blocks, 16), blocks)


def quantise_q5_1(weights: np.ndarray, blocks: np.ndarray) -> None:
    _store_five_bits(_from_minimum(weights, blocks, 31), blocks)


def quantise_q8_0(weights: np.ndarray, blocks: np.ndarray) -> None:
    x = columns(weights, 32)
    scale = np.abs(x).max(axis=0) / np.float32(127)
    blocks["d"] = scale
    blocks["qs"] = _integers(_round_half_away(x * _reciprocal(scale))).astype(np.int8).T


def quantise_mxfp4(weights: np.ndarray, blocks: np.ndarray) -> None:
    """The scale is a power of two, the code that of the nearest value."""
    x = columns(weights, 32)
    peak = np.abs(x).max(axis=0)
    # C's log2f is a correctly rounded logarithm here; NumPy's f32 one need not be, the f64 one is exact enough.
    exponent = np.floor(np.log2(peak.astype(np.float64)).astype(np.float32)) + 125
    blocks["e"] = np.where(peak > 0, exponent, 0).astype(np.int32).astype(np.uint8)  # wraps around as in C
    doubled = np.ldexp(x, 129 - blocks["e"].astype(np.int32))
    negative = doubled < 0
    codes = CODE_OF_HALVES.take(np.ceil(np.abs(doubled, out=doubled), out=doubled).astype(np.int8))
    codes += (negative & (codes > 0)) * np.uint8(8)
    store_nibbles(codes, blocks)


def quantise_tq1_0(weights: np.ndarray, blocks: np.ndarray) -> None:
    """Five base-3 digits a byte, stored as a fraction of 256 rounded up; the last four bytes hold four digits."""
    digits = _ternary(weights, blocks)
    parts = []
    for start, width, count in ((0, 32, 5), (160, 16, 5), (240, 4, 4)):
        value = np.zeros((len(weights), width), np.uint16)
        for k in range(5):
            value *= 3
            if k < count:
                value += digits[:, start + k * width : start + (k + 1) * width]
        parts.append((value * 256 + 242) // 243)
    blocks["qs"] = np.concatenate(parts[:2], axis=1)
    blocks["qh"] = parts[2]


def quantise_tq2_0(weights: np.ndarray, blocks: np.ndarray) -> None:
    digits = _ternary(weights, blocks).reshape(-1, 2, 4, 32)
    digits <<= np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    blocks["qs"] = np.bitwise_or.reduce(digits, axis=2).reshape(-1, 64)


def store_nibbles(codes: np.ndarray, blocks: np.ndarray) -> None:
    """Codes uint8 [32, n] into ``qs``: element j in the low half of byte j, element 16 + j in the high half."""
    blocks["qs"] = (codes[:16] & 15 | codes[16:] << 4).T


def _store_five_bits(codes: np.ndarray, blocks: np.ndarray) -> None:
    store_nibbles(codes, blocks)
    blocks["qh"] = np.packbits(codes >> 4, axis=0, bitorder="little").T


def _symmetric(weights: np.ndarray, blocks: np.ndarray, middle: int) -> np.ndarray:
    """Codes around `middle`: the number of largest magnitude becomes code 0, whatever its sign."""
    x = columns(weights, 32)
    scale = largest(x) / np.float32(-middle)
    blocks["d"] = scale
    x *= _reciprocal(scale)
    x += np.float32(middle + 0.5)
    return np.minimum(_integers(x).astype(np.uint8), 2 * middle - 1)


def _from_minimum(weights: np.ndarray, blocks: np.ndarray, top: int) -> np.ndarray:
    """Codes from 0 for the minimum to `top` for the maximum."""
    x = columns(weights, 32)
    least = x.min(axis=0)
    (zeros,) = np.nonzero(least == 0)
    if len(zeros):  # of 0 and -0 the first in the block is the minimum
        first = (x[:, zeros] == 0).argmax(axis=0)
        least[zeros] = x[first, zeros]
    scale = (x.max(axis=0) - least) / np.float32(top) + np.float32(0)  # never -0
    blocks["d"], blocks["m"] = scale, least
    x -= least
    x *= _reciprocal(scale)
    x += np.float32(0.5)
    return np.minimum(_integers(x).astype(np.uint8), top)


def _ternary(weights: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 256]: 0, 1 or 2 for -1, 0 or 1 times the largest magnitude."""
    scale = np.abs(weights).max(axis=1)
    blocks["d"] = scale
    rounded = _round_half_away(weights * _reciprocal(scale)[:, None])
    return (_integers(rounded) + 1).astype(np.uint8)


def _reciprocal(scale: np.ndarray) -> np.ndarray:
    return np.where(scale == 0, np.float32(0), 1 / scale)


def _integers(values: np.ndarray) -> np.ndarray:
    """int32 by truncation; 0 for inf and nan, which come of scales whose reciprocal overflows."""
    np.copyto(values, 0, where=~np.isfinite(values))
    return values.astype(np.int32)


def _round_half_away(values: np.ndarray) -> np.ndarray:
    """C's roundf, which NumPy lacks."""
    whole = np.trunc(values)
    whole += np.trunc(2 * (values - whole))
    return whole
