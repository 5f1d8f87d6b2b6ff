"""ggml's K-quants, and IQ4_XS: super-blocks of 256 numbers whose 8 or 16 sub-blocks have small integer scales.

Functions as in `ggml_simple`.
"""

from __future__ import annotations

import numpy as np

from llmjax.weights.ggml.simple import Parts, copied, one, runs


def _codes(packed: np.ndarray, run: int, bits: int) -> np.ndarray:
    """uint8 [n, 256] of bytes [n, b], each `run` of which hold so many bits of consecutive runs of codes."""
    return runs(packed.reshape(-1, run), bits).reshape(len(packed), -1)


def q2_k(blocks: np.ndarray) -> Parts:
    scales = copied(blocks["scales"])
    return {
        "codes": _codes(copied(blocks["qs"]), 32, 2),
        "scales": scales & 15,
        "minima": scales >> 4,
        "super_scales": one(blocks["d"]),
        "super_minima": one(blocks["dmin"]),
    }


def q3_k(blocks: np.ndarray) -> Parts:
    """Bit s of mask byte l is the third bit of element l of run s; scales are split into 4 low and 2 high bits."""
    packed = copied(blocks["scales"])
    scales = runs(packed[:, :8].copy(), 4) | runs(packed[:, 8:].copy(), 2) << 4
    third = runs(copied(blocks["hmask"]), 1)
    third <<= 2
    third |= _codes(copied(blocks["qs"]), 32, 2)
    return {"codes": third, "scales": (scales - 32).view(np.int8), "super_scales": one(blocks["d"])}


def q4_k(blocks: np.ndarray) -> Parts:
    """Eight sub-blocks with 6-bit scales and minima.

    The first four scales and minima are the low six bits of bytes 0-3 and 4-7; the last four take their low
    halves from the nibbles of bytes 8-11 and their top two bits from those of bytes 0-3 and 4-7.
    """
    packed = copied(blocks["scales"]).reshape(-1, 3, 4)
    first, second, third = packed[:, 0], packed[:, 1], packed[:, 2]
    return {
        "codes": _codes(copied(blocks["qs"]), 32, 4),
        "scales": np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1),
        "minima": np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1),
        "super_scales": one(blocks["d"]),
        "super_minima": one(blocks["dmin"]),
    }


def q5_k(blocks: np.ndarray) -> Parts:
    """Q4_K, and bit s of qh byte l is the fifth bit of element l of sub-block s."""
    parts = q4_k(blocks)
    fifth = runs(copied(blocks["qh"]), 1)
    fifth <<= 4
    parts["codes"] |= fifth
    return parts


def q6_k(blocks: np.ndarray) -> Parts:
    codes = _codes(copied(blocks["qh"]), 32, 2)
    codes <<= 4
    codes |= _codes(copied(blocks["ql"]), 64, 4)
    return {"codes": codes, "scales": copied(blocks["scales"]).view(np.int8), "super_scales": one(blocks["d"])}


def iq4_xs(blocks: np.ndarray) -> Parts:
    top = one(blocks["scales_h"]) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = runs(copied(blocks["scales_l"]).reshape(-1, 1), 4).reshape(-1, 8)
    scales = low + (top.astype(np.uint8) << 4) - 32
    return {
        "codes": _codes(copied(blocks["qs"]), 16, 4),
        "scales": scales.view(np.int8),
        "super_scales": one(blocks["d"]),
    }
