"""ggml's reference quantizers: weights in the blocks of a GGUF file, bit for bit as ggml writes them.

Each ``quantize_…`` fills structured blocks [n] (layouts: `types.GGML_TYPES`) from f32 [n, elems], bit for bit as
``quantize_row_*_ref`` of ggml-quants.c, which quantizing without an importance matrix uses as well.

* q4_0 to q8_0, mxfp4 and the ternary types, without a search: codes are computed with the f32 reciprocal of the scale
  before the scale is rounded to f16. Numbers of a block form a column, so that operations per block run over contiguous
  memory.
* K-quants: sub-blocks are fitted separately, their scales are rounded to small multiples of the block's scale, and
  codes are computed again with the rounded scales.
* iq4_nl and iq4_xs, whose codes stand for 16 unevenly spaced levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from llmjax.errors import CheckpointError
from llmjax.kernels.cpu import quantizers as cpu
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.weights.ggml.search import (
    ALL_ZERO,
    AffineFit,
    AffineSearch,
    columns,
    fit_affine,
    fit_symmetric,
    fit_symmetric_by_code,
    largest,
    nearest,
    ordered_sum,
    requantize,
)
from llmjax.weights.ggml.types import GGML_TYPES, BlockType
from llmjax.weights.ggml.unpack import FP4_DOUBLED, IQ4_LEVELS
from llmjax.weights.rows import numpy_threads

FP4_CODE_OF_HALVES = np.searchsorted((FP4_DOUBLED[:7] + FP4_DOUBLED[1:8]) / 2, np.arange(33) / 2).astype(np.uint8)
"""Code of a magnitude in (h/2 - 1/2, h/2] for each h, uint8 [33]; of two equally near codes, the lower one."""


def quantize_q4_0(weights: np.ndarray, blocks: np.ndarray) -> None:
    store_nibbles(_symmetric(weights, blocks, 8), blocks)


def quantize_q4_1(weights: np.ndarray, blocks: np.ndarray) -> None:
    store_nibbles(_from_minimum(weights, blocks, 15), blocks)


def quantize_q5_0(weights: np.ndarray, blocks: np.ndarray) -> None:
    _store_five_bits(_symmetric(weights, blocks, 16), blocks)


def quantize_q5_1(weights: np.ndarray, blocks: np.ndarray) -> None:
    _store_five_bits(_from_minimum(weights, blocks, 31), blocks)


def quantize_q8_0(weights: np.ndarray, blocks: np.ndarray) -> None:
    x = columns(weights, 32)
    scale = np.abs(x).max(axis=0) / np.float32(127)
    blocks["d"] = scale
    blocks["qs"] = _integers(_round_half_away(x * _reciprocal(scale))).astype(np.int8).T


def quantize_mxfp4(weights: np.ndarray, blocks: np.ndarray) -> None:
    """Fills MXFP4 blocks: the scale is a power of two, and the code is that of the nearest value."""
    x = columns(weights, 32)
    peak = np.abs(x).max(axis=0)
    # C's log2f is a correctly rounded logarithm here; NumPy's f32 one need not be, the f64 one is exact enough.
    exponent = np.floor(np.log2(peak.astype(np.float64)).astype(np.float32)) + 125
    blocks["e"] = np.where(peak > 0, exponent, 0).astype(np.int32).astype(np.uint8)  # wraps around as in C
    doubled = np.ldexp(x, 129 - blocks["e"].astype(np.int32))
    negative = doubled < 0
    codes = FP4_CODE_OF_HALVES.take(np.ceil(np.abs(doubled, out=doubled), out=doubled).astype(np.int8))
    codes += (negative & (codes > 0)) * np.uint8(8)
    store_nibbles(codes, blocks)


def quantize_tq1_0(weights: np.ndarray, blocks: np.ndarray) -> None:
    """Fills TQ1_0 blocks: a byte holds five base-3 digits as a fraction of 256 rounded up, the last four bytes four."""
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


def quantize_tq2_0(weights: np.ndarray, blocks: np.ndarray) -> None:
    digits = _ternary(weights, blocks).reshape(-1, 2, 4, 32)
    digits <<= np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    blocks["qs"] = np.bitwise_or.reduce(digits, axis=2).reshape(-1, 64)


def store_nibbles(codes: np.ndarray, blocks: np.ndarray) -> None:
    """Stores codes uint8 [32, n] in ``qs``: element j in the low half of byte j, element 16 + j in the high half."""
    blocks["qs"] = (codes[:16] & 15 | codes[16:] << 4).T


def _store_five_bits(codes: np.ndarray, blocks: np.ndarray) -> None:
    store_nibbles(codes, blocks)
    blocks["qh"] = np.packbits(codes >> 4, axis=0, bitorder="little").T


def _symmetric(weights: np.ndarray, blocks: np.ndarray, middle: int) -> np.ndarray:
    """Codes around `middle`: the number of largest magnitude gets code 0, whatever its sign is."""
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
    if len(zeros):  # if a block has 0 and -0, the first of them is the minimum
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
    """int32 by truncation; 0 for inf and nan, which come from scales with a reciprocal that overflows."""
    np.copyto(values, 0, where=~np.isfinite(values))
    return values.astype(np.int32)


def _round_half_away(values: np.ndarray) -> np.ndarray:
    """C's roundf, which NumPy lacks."""
    whole = np.trunc(values)
    whole += np.trunc(2 * (values - whole))
    return whole


Q2_SEARCH = AffineSearch(top=3, first=-0.5, steps=15, absolute=True)
Q4_SEARCH = AffineSearch(top=15, first=-1.0, steps=20)
Q5_SEARCH = AffineSearch(top=31, first=-0.5, steps=15)


def quantize_q2_k(weights: np.ndarray, blocks: np.ndarray) -> None:
    x = columns(weights, 16)
    fit = fit_affine(x, np.abs(x), Q2_SEARCH)
    scales, minima = fit.scale.reshape(-1, 16), -fit.minimum.reshape(-1, 16)
    top_scale, top_minimum = _maximum(scales), _maximum(minima)
    fifteen = np.float32(15)
    blocks["d"], blocks["dmin"] = top_scale[:, 0] / fifteen, top_minimum[:, 0] / fifteen
    low = nearest(np.where(top_scale > 0, fifteen / top_scale, 0) * scales)
    high = nearest(np.where(top_minimum > 0, fifteen / top_minimum, 0) * minima)
    blocks["scales"] = (low | high << 4).astype(np.uint8)
    stored = blocks["scales"]
    blocks["qs"] = _two_bits(
        _affine_codes(x, fit, factors=_times(blocks["d"], stored & 15), offsets=_times(blocks["dmin"], stored >> 4))
    )


def quantize_q3_k(weights: np.ndarray, blocks: np.ndarray) -> None:
    x = columns(weights, 16)
    fit = fit_symmetric_by_code(x, 4)
    scales = fit.scale.reshape(-1, 16)
    peak = _largest_scale(scales)
    inverse = np.float32(-32) / peak
    # The inverse of a tiny scale is infinite; ggml then keeps the low byte of the converted number.
    whole = np.where(peak == 0, -32, nearest(inverse * scales).astype(np.int8).clip(-32, 31))
    blocks["d"] = np.where(peak == 0, 0, 1 / inverse)[:, 0]
    bits = (whole + 32).astype(np.uint8)
    blocks["scales"][:, :8] = bits[:, :8] & 15 | bits[:, 8:] << 4
    top = (bits >> 4).reshape(-1, 4, 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    blocks["scales"][:, 8:] = np.bitwise_or.reduce(top, axis=1)
    codes = _symmetric_codes(x, fit.codes, _times(blocks["d"], whole), 4)
    blocks["hmask"] = np.packbits((codes > 3).reshape(-1, 8, 32), axis=1, bitorder="little")[:, 0]
    blocks["qs"] = _two_bits(codes & 3)


def quantize_q4_k(weights: np.ndarray, blocks: np.ndarray) -> None:
    codes = _eight_sub_blocks(weights, blocks, Q4_SEARCH)
    _store_nibbles_by_pair(codes, blocks)


def quantize_q5_k(weights: np.ndarray, blocks: np.ndarray) -> None:
    codes = _eight_sub_blocks(weights, blocks, Q5_SEARCH)
    _store_nibbles_by_pair(codes & 15, blocks)
    blocks["qh"] = np.packbits((codes >> 4).reshape(-1, 8, 32), axis=1, bitorder="little")[:, 0]


def quantize_q6_k(weights: np.ndarray, blocks: np.ndarray) -> None:
    x = columns(weights, 16)
    fit = fit_symmetric(x, 32)
    scales = fit.scale.reshape(-1, 16)
    peak = _largest_scale(scales)
    zero = np.abs(peak[:, 0]) < ALL_ZERO
    inverse = np.float32(-128) / peak
    blocks["d"] = 1 / inverse[:, 0]
    blocks["scales"] = np.minimum(nearest(inverse * scales), 127).astype(np.int8)
    codes = _symmetric_codes(x, fit.codes, _times(blocks["d"], blocks["scales"]), 32)
    halves = codes.reshape(-1, 2, 2, 64)  # half of the block, low or high nibble, byte
    blocks["ql"] = (halves[:, :, 0] & 15 | halves[:, :, 1] << 4).reshape(-1, 128)
    blocks["qh"] = _two_bits(codes >> 4)
    blocks[zero] = np.zeros((), blocks.dtype)


def _maximum(values: np.ndarray) -> np.ndarray:
    """The maximum, [n, 1], at least 0 and never -0; nan does not count."""
    return np.fmax.reduce(values, axis=1, keepdims=True, initial=0) + np.float32(0)


def _largest_scale(scales: np.ndarray) -> np.ndarray:
    """The first scale of largest magnitude, f32 [n, 1]; 0 if there is none; nan does not count."""
    index = np.where(np.isnan(scales), 0, np.abs(scales)).argmax(axis=1)[:, None]
    found = np.take_along_axis(scales, index, axis=1)
    found[np.isnan(found)] = 0
    return found


def _eight_sub_blocks(weights: np.ndarray, blocks: np.ndarray, search: AffineSearch) -> np.ndarray:
    """The common part of Q4_K and Q5_K: stores scales and minima of six bits, returns codes uint8 [n, 256]."""
    x = columns(weights, 32)
    magnitude = np.abs(x)
    magnitude += np.sqrt(ordered_sum(x * x) / np.float32(32))
    fit = fit_affine(x, magnitude, search)
    scales, minima = fit.scale.reshape(-1, 8), -fit.minimum.reshape(-1, 8)
    top_scale, top_minimum = _maximum(scales), _maximum(minima)
    top = np.float32(63)
    blocks["d"], blocks["dmin"] = top_scale[:, 0] / top, top_minimum[:, 0] / top
    low = np.minimum(nearest(np.where(top_scale > 0, top / top_scale, 0) * scales).astype(np.uint8), 63)
    high = np.minimum(nearest(np.where(top_minimum > 0, top / top_minimum, 0) * minima).astype(np.uint8), 63)
    packed = blocks["scales"]
    packed[:, :4] = low[:, :4] | low[:, 4:] >> 4 << 6
    packed[:, 4:8] = high[:, :4] | high[:, 4:] >> 4 << 6
    packed[:, 8:] = low[:, 4:] & 15 | high[:, 4:] << 4
    return _affine_codes(x, fit, factors=_times(blocks["d"], low), offsets=_times(blocks["dmin"], high))


def _affine_codes(x: np.ndarray, fit: AffineFit, *, factors: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Codes uint8 [n, 256] for rounded scales and minima f32 [n, sub-blocks]; the search's codes where scales are 0."""
    flat = factors.reshape(-1)
    codes = requantize(x + offsets.reshape(-1), flat, bounds=(0, fit.top))
    (lost,) = np.nonzero(flat == 0)
    if len(lost):
        codes[:, lost] = fit.codes(x, lost)
    return _rows(codes)


def _times(scale: np.ndarray, integers: np.ndarray) -> np.ndarray:
    """The scales f32 [n, sub-blocks] that stored f16 scales [n] and stored integers [n, sub-blocks] stand for."""
    return scale.astype(np.float32)[:, None] * integers


def _symmetric_codes(x: np.ndarray, searched: np.ndarray, factors: np.ndarray, middle: int) -> np.ndarray:
    """Codes uint8 [n, 256] for the rounded scales f32 [n, 16]; the search's codes where these are 0."""
    flat = factors.reshape(-1)
    codes = requantize(x, flat, bounds=(-middle, middle - 1))
    codes += middle
    return _rows(np.where(flat == 0, searched, codes))


def _rows(codes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(codes.astype(np.uint8).T).reshape(-1, 256)


def _two_bits(codes: np.ndarray) -> np.ndarray:
    """Packs codes below 4, [n, 256], as uint8 [n, 64]: in each half of a block, 4 runs of 32 codes share 32 bytes."""
    shifted = codes.reshape(-1, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(shifted, axis=2).reshape(-1, 64)


def _store_nibbles_by_pair(codes: np.ndarray, blocks: np.ndarray) -> None:
    pairs = codes.reshape(-1, 4, 2, 32)
    blocks["qs"] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)


IQ4_TRIES = 7  # multipliers tried on each side of the first
IQ4_HALVES = 2 * 128  # index of 0 in the tables

# Levels are integers, so the nearest one depends only on twice the number, rounded down; ties go up.
IQ4_CODE_OF_HALVES = np.searchsorted(
    (IQ4_LEVELS[:-1] + IQ4_LEVELS[1:]) / 2, np.arange(-IQ4_HALVES, IQ4_HALVES) / 2, side="right"
).astype(np.uint8)
"""Code of a number from k/2 - 128 to (k + 1)/2 - 128 for each k, uint8 [512]."""
IQ4_LEVEL_OF_HALVES = IQ4_LEVELS[IQ4_CODE_OF_HALVES]


def quantize_iq4_nl(weights: np.ndarray, blocks: np.ndarray) -> None:
    x = columns(weights, 32)
    scale = _fit_iq4(x)
    blocks["d"] = scale
    store_nibbles(_iq4_codes(x, np.where(scale == 0, 0, 1 / scale)), blocks)


def quantize_iq4_xs(weights: np.ndarray, blocks: np.ndarray) -> None:
    x = columns(weights, 32)
    scales = _fit_iq4(x).reshape(-1, 8)
    magnitude = np.where(np.isnan(scales), 0, np.abs(scales))
    peak = np.take_along_axis(scales, magnitude.argmax(axis=1)[:, None], axis=1)
    block_scale = np.where(np.isnan(peak), 0, peak) / np.float32(-32)
    blocks["d"] = block_scale[:, 0]
    whole = nearest(np.where(block_scale == 0, 0, 1 / block_scale) * scales).clip(-32, 31)
    factors = block_scale * whole.astype(np.float32)
    codes = _iq4_codes(x, np.where(factors == 0, 0, 1 / factors).reshape(-1))
    bits = (whole + 32).astype(np.uint16)
    blocks["scales_l"] = bits[:, 0::2] & 15 | (bits[:, 1::2] & 15) << 4
    blocks["scales_h"] = np.bitwise_or.reduce(bits >> 4 << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    packed = codes[:16] | codes[16:] << 4
    blocks["qs"] = packed.T.reshape(-1, 128)


def _fit_iq4(x: np.ndarray) -> np.ndarray:
    """Scales f32 [n] with the least error weighted by squares, for f32 [32, n]."""
    peak = largest(x)
    zero = np.abs(peak) < ALL_ZERO
    peak[zero] = 1
    weights = x * x
    work = np.empty_like(x)

    def sums(multiplier: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        levels = IQ4_LEVEL_OF_HALVES.take(_iq4_halves(x, multiplier))
        np.multiply(weights, levels, out=work)
        sum_q2 = ordered_sum(work * levels)
        np.multiply(work, x, out=work)
        return ordered_sum(work), sum_q2

    lowest = IQ4_LEVELS[0]
    sum_qx, sum_q2 = sums(1 / (-peak / lowest))
    scale = np.where(sum_q2 > 0, sum_qx / sum_q2, 0)
    best = scale * sum_qx
    for step in range(-IQ4_TRIES, IQ4_TRIES + 1):
        sum_qx, sum_q2 = sums((np.float32(step) + lowest) / peak)
        better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2)
        scale = np.where(better, sum_qx / sum_q2, scale)
        best = np.where(better, scale * sum_qx, best)
    scale[zero] = 0
    return scale


def _iq4_codes(x: np.ndarray, multiplier: np.ndarray) -> np.ndarray:
    return IQ4_CODE_OF_HALVES.take(_iq4_halves(x, multiplier))


def _iq4_halves(x: np.ndarray, multiplier: np.ndarray) -> np.ndarray:
    """Indices into the tables, int16 [m, n]."""
    scaled = x * multiplier
    scaled += scaled
    np.floor(scaled, out=scaled)
    np.clip(scaled, -IQ4_HALVES, IQ4_HALVES - 1, out=scaled)
    scaled += IQ4_HALVES
    np.copyto(scaled, 2 * IQ4_HALVES - 1, where=np.isnan(scaled))  # ggml's search ends at the upper end for nan
    return scaled.astype(np.int16)


TILE = 1 << 16  # weights quantized at a time, so that they and the arrays of a search stay in the L2 cache

SCALES = frozenset({"d", "m", "dmin"})  # fields of blocks that are f16
LARGEST = 2.0**29  # more than any block with f16 scales holds; far above it, searches overflow to zero blocks

Fill = Callable[[np.ndarray, np.ndarray], None]
"""A function that fills structured blocks [n] from f32 [n, elems]."""


@dataclass(frozen=True)
class BlockQuantizer:
    """A ggml type that can be written.

    Attributes:
        block: the block type.
        fill: the quantizer.
    """

    block: BlockType
    fill: Fill

    @property
    def native(self) -> bool:
        """Whether there is a C++ quantizer, which gives the same result faster."""
        return cpu.quantizes(self.block.type_id)


_FILLS: Mapping[str, Fill] = {
    "q4_0": quantize_q4_0,
    "q4_1": quantize_q4_1,
    "q5_0": quantize_q5_0,
    "q5_1": quantize_q5_1,
    "q8_0": quantize_q8_0,
    "q2_k": quantize_q2_k,
    "q3_k": quantize_q3_k,
    "q4_k": quantize_q4_k,
    "q5_k": quantize_q5_k,
    "q6_k": quantize_q6_k,
    "iq4_nl": quantize_iq4_nl,
    "iq4_xs": quantize_iq4_xs,
    "tq1_0": quantize_tq1_0,
    "tq2_0": quantize_tq2_0,
    "mxfp4": quantize_mxfp4,
}
_BY_NAME = {block.name.lower(): block for block in GGML_TYPES.values()}

QUANTIZERS: Mapping[str, BlockQuantizer] = MappingProxyType(
    {name: BlockQuantizer(_BY_NAME[name], fill) for name, fill in _FILLS.items()}
)
"""Schemes by ggml's name in lower case."""


def quantize(weights: np.ndarray, scheme: str, *, threads: int | None = None) -> np.ndarray:
    """Quantizes weights to the blocks of a GGUF file.

    Args:
        weights: float [rows, columns]; columns a multiple of the scheme's block (32, 256 for K-quants, iq4_xs and the
            ternary types). Types other than f32 are converted first, tile by tile.
        scheme: a key of QUANTIZERS.
        threads: number of threads; None: one for each core that this process may use.

    Returns:
        uint8 [rows, bytes of a row], which `types.dequantize` reads.

    Raises:
        CheckpointError: columns do not fill blocks; a weight is infinite or not a number, or beyond what the scheme's
            scales can hold.
    """
    block = QUANTIZERS[scheme].block
    rows, columns = weights.shape
    if columns % block.elems:
        raise CheckpointError(f"rows of {columns} weights cannot be quantized to {scheme} in blocks of {block.elems}")
    source = np.ascontiguousarray(weights).reshape(-1, block.elems)
    blocks = np.empty(len(source), block.layout)
    step = TILE // block.elems

    native = QUANTIZERS[scheme].native
    quantize_tile = _quantized_natively if native else _quantized_by_numpy

    def fill(start: int) -> None:
        tile = source[start : start + step].astype(np.float32, copy=False)
        found = quantize_tile(tile, scheme, blocks[start : start + step])
        if found is cpu.Quantized.NOT_FINITE:
            raise CheckpointError(f"weights that are infinite or not a number cannot be quantized to {scheme}")
        if found is cpu.Quantized.TOO_LARGE:
            peak = np.abs(tile).max()
            raise CheckpointError(f"weights up to {peak:.3g} are too large for {scheme}: a scale would exceed float16")

    starts = range(0, len(source), step)
    workers = min(len(starts), threads or (usable_cores() if native else numpy_threads()))
    if workers > 1:
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(fill, starts):
                pass
    else:
        for start in starts:
            fill(start)
    return blocks.view(np.uint8).reshape(rows, -1)


def _quantized_natively(tile: np.ndarray, scheme: str, blocks: np.ndarray) -> cpu.Quantized:
    return cpu.quantize_blocks(tile, blocks.view(np.uint8), type_id=QUANTIZERS[scheme].block.type_id)


def _quantized_by_numpy(tile: np.ndarray, scheme: str, blocks: np.ndarray) -> cpu.Quantized:
    peak = np.abs(tile).max(initial=0)
    if not np.isfinite(peak):
        return cpu.Quantized.NOT_FINITE
    fill_blocks(tile, scheme, blocks)
    scales = [blocks[field] for field in SCALES.intersection(blocks.dtype.names or ())]
    if scales and (peak > LARGEST or not all(np.isfinite(scale).all() for scale in scales)):
        return cpu.Quantized.TOO_LARGE
    return cpu.Quantized.DONE


def fill_blocks(weights: np.ndarray, scheme: str, blocks: np.ndarray) -> None:
    """Quantizes one tile without checks, as ggml does, even where scales overflow.

    Args:
        weights: finite f32 [n, elems].
        scheme: a key of QUANTIZERS.
        blocks: structured array [n] of the scheme's layout, to be filled.
    """
    with np.errstate(all="ignore"):
        QUANTIZERS[scheme].fill(weights, blocks)
