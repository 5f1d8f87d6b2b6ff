"""ggml's quantisers of iq4_nl and iq4_xs, whose codes stand for 16 unevenly spaced levels.

What ``quantize_iq4_nl`` and ``quantize_iq4_xs`` of ggml-quants.c write without an importance matrix, bit for bit.
"""

from __future__ import annotations

import numpy as np

from llmjax.weights.ggml.reference_search import ALL_ZERO, columns, largest, nearest, ordered_sum
from llmjax.weights.ggml.reference_simple import store_nibbles
from llmjax.weights.ggml.simple import IQ4_LEVELS

TRIES = 7  # multipliers tried on each side of the first
_HALVES = 2 * 128  # where 0 lies in the tables

# Levels are whole numbers, so the nearest one depends on the number in halves, rounded down; upper of two as near.
CODE_OF_HALVES = np.searchsorted(
    (IQ4_LEVELS[:-1] + IQ4_LEVELS[1:]) / 2, np.arange(-_HALVES, _HALVES) / 2, side="right"
).astype(np.uint8)
"""uint8 [512]: code of a number k/2 - 128 to (k + 1)/2 - 128."""
LEVEL_OF_HALVES = IQ4_LEVELS[CODE_OF_HALVES]


def quantise_iq4_nl(weights: np.ndarray, blocks: np.ndarray) -> None:
    x = columns(weights, 32)
    scale = _fit(x)
    blocks["d"] = scale
    store_nibbles(_codes(x, np.where(scale == 0, 0, 1 / scale)), blocks)


def quantise_iq4_xs(weights: np.ndarray, blocks: np.ndarray) -> None:
    x = columns(weights, 32)
    scales = _fit(x).reshape(-1, 8)
    magnitude = np.where(np.isnan(scales), 0, np.abs(scales))
    peak = np.take_along_axis(scales, magnitude.argmax(axis=1)[:, None], axis=1)
    block_scale = np.where(np.isnan(peak), 0, peak) / np.float32(-32)
    blocks["d"] = block_scale[:, 0]
    whole = nearest(np.where(block_scale == 0, 0, 1 / block_scale) * scales).clip(-32, 31)
    factors = block_scale * whole.astype(np.float32)
    codes = _codes(x, np.where(factors == 0, 0, 1 / factors).reshape(-1))
    bits = (whole + 32).astype(np.uint16)
    blocks["scales_l"] = bits[:, 0::2] & 15 | (bits[:, 1::2] & 15) << 4
    blocks["scales_h"] = np.bitwise_or.reduce(bits >> 4 << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    packed = codes[:16] | codes[16:] << 4
    blocks["qs"] = packed.T.reshape(-1, 128)


def _fit(x: np.ndarray) -> np.ndarray:
    """f32 [n]: scales of least error weighted by squares, for f32 [32, n]."""
    peak = largest(x)
    zero = np.abs(peak) < ALL_ZERO
    peak[zero] = 1
    weights = x * x
    work = np.empty_like(x)

    def sums(multiplier: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        levels = LEVEL_OF_HALVES.take(_halves(x, multiplier))
        np.multiply(weights, levels, out=work)
        sum_q2 = ordered_sum(work * levels)
        np.multiply(work, x, out=work)
        return ordered_sum(work), sum_q2

    lowest = IQ4_LEVELS[0]
    sum_qx, sum_q2 = sums(1 / (-peak / lowest))
    scale = np.where(sum_q2 > 0, sum_qx / sum_q2, 0)
    best = scale * sum_qx
    for step in range(-TRIES, TRIES + 1):
        sum_qx, sum_q2 = sums((np.float32(step) + lowest) / peak)
        better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2)
        scale = np.where(better, sum_qx / sum_q2, scale)
        best = np.where(better, scale * sum_qx, best)
    scale[zero] = 0
    return scale


def _codes(x: np.ndarray, multiplier: np.ndarray) -> np.ndarray:
    return CODE_OF_HALVES.take(_halves(x, multiplier))


def _halves(x: np.ndarray, multiplier: np.ndarray) -> np.ndarray:
    """int16 [m, n], places in the tables."""
    scaled = x * multiplier
    scaled += scaled
    np.floor(scaled, out=scaled)
    np.clip(scaled, -_HALVES, _HALVES - 1, out=scaled)
    scaled += _HALVES
    np.copyto(scaled, 2 * _HALVES - 1, where=np.isnan(scaled))  # ggml's search ends at the upper end for nan
    return scaled.astype(np.int16)
