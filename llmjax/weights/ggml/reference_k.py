"""ggml's reference quantisers of K-quants: ``quantize_row_q{2,3,4,5,6}_K_ref``, which quantising without an
importance matrix uses as well.

Each function fills structured blocks [n] (layouts: `ggml.GGML_TYPES`) from f32 [n, 256]. Sub-blocks are fitted on
their own, their scales are rounded to a few bits of the block's scale, and codes are formed anew with what is left.
"""

from __future__ import annotations

import numpy as np

from llmjax.weights.ggml.reference_search import (
    ALL_ZERO,
    AffineFit,
    AffineSearch,
    columns,
    fit_affine,
    fit_symmetric,
    fit_symmetric_by_code,
    nearest,
    ordered_sum,
    requantise,
)

Q2_SEARCH = AffineSearch(top=3, first=-0.5, steps=15, absolute=True)
Q4_SEARCH = AffineSearch(top=15, first=-1.0, steps=20)
Q5_SEARCH = AffineSearch(top=31, first=-0.5, steps=15)


def quantise_q2_k(weights: np.ndarray, blocks: np.ndarray) -> None:
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


def quantise_q3_k(weights: np.ndarray, blocks: np.ndarray) -> None:
    x = columns(weights, 16)
    fit = fit_symmetric_by_code(x, 4)
    scales = fit.scale.reshape(-1, 16)
    peak = _largest_scale(scales)
    inverse = np.float32(-32) / peak
    # The inverse of a tiny scale is infinite; ggml then keeps the low byte of what becomes of it.
    whole = np.where(peak == 0, -32, nearest(inverse * scales).astype(np.int8).clip(-32, 31))
    blocks["d"] = np.where(peak == 0, 0, 1 / inverse)[:, 0]
    bits = (whole + 32).astype(np.uint8)
    blocks["scales"][:, :8] = bits[:, :8] & 15 | bits[:, 8:] << 4
    top = (bits >> 4).reshape(-1, 4, 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    blocks["scales"][:, 8:] = np.bitwise_or.reduce(top, axis=1)
    codes = _symmetric_codes(x, fit.codes, _times(blocks["d"], whole), 4)
    blocks["hmask"] = np.packbits((codes > 3).reshape(-1, 8, 32), axis=1, bitorder="little")[:, 0]
    blocks["qs"] = _two_bits(codes & 3)


def quantise_q4_k(weights: np.ndarray, blocks: np.ndarray) -> None:
    codes = _eight_sub_blocks(weights, blocks, Q4_SEARCH)
    _store_nibbles(codes, blocks)


def quantise_q5_k(weights: np.ndarray, blocks: np.ndarray) -> None:
    codes = _eight_sub_blocks(weights, blocks, Q5_SEARCH)
    _store_nibbles(codes & 15, blocks)
    blocks["qh"] = np.packbits((codes >> 4).reshape(-1, 8, 32), axis=1, bitorder="little")[:, 0]


def quantise_q6_k(weights: np.ndarray, blocks: np.ndarray) -> None:
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
    """[n, 1], at least 0 and never -0; nan does not count."""
    return np.fmax.reduce(values, axis=1, keepdims=True, initial=0) + np.float32(0)


def _largest_scale(scales: np.ndarray) -> np.ndarray:
    """f32 [n, 1]: the first scale of largest magnitude, 0 if there is none; nan does not count."""
    index = np.where(np.isnan(scales), 0, np.abs(scales)).argmax(axis=1)[:, None]
    found = np.take_along_axis(scales, index, axis=1)
    found[np.isnan(found)] = 0
    return found


def _eight_sub_blocks(weights: np.ndarray, blocks: np.ndarray, search: AffineSearch) -> np.ndarray:
    """What Q4_K and Q5_K share: stores scales and minima of six bits, returns codes uint8 [n, 256]."""
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
    """uint8 [n, 256]: codes for the rounded scales and minima f32 [n, sub-blocks]; the search's where scales are 0."""
    flat = factors.reshape(-1)
    codes = requantise(x + offsets.reshape(-1), flat, bounds=(0, fit.top))
    (lost,) = np.nonzero(flat == 0)
    if len(lost):
        codes[:, lost] = fit.codes(x, lost)
    return _rows(codes)


def _times(scale: np.ndarray, integers: np.ndarray) -> np.ndarray:
    """f32 [n, sub-blocks]: what the stored f16 scales [n] make of the stored integers [n, sub-blocks]."""
    return scale.astype(np.float32)[:, None] * integers


def _symmetric_codes(x: np.ndarray, searched: np.ndarray, factors: np.ndarray, middle: int) -> np.ndarray:
    """uint8 [n, 256]: codes for the rounded scales f32 [n, 16]; what the search found where these are 0."""
    flat = factors.reshape(-1)
    codes = requantise(x, flat, bounds=(-middle, middle - 1))
    codes += middle
    return _rows(np.where(flat == 0, searched, codes))


def _rows(codes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(codes.astype(np.uint8).T).reshape(-1, 256)


def _two_bits(codes: np.ndarray) -> np.ndarray:
    """uint8 [n, 64] of codes below 4 [n, 256]: in each half of a block, 4 runs of 32 share 32 bytes."""
    shifted = codes.reshape(-1, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(shifted, axis=2).reshape(-1, 64)


def _store_nibbles(codes: np.ndarray, blocks: np.ndarray) -> None:
    pairs = codes.reshape(-1, 4, 2, 32)
    blocks["qs"] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
