"""ggml's K-quants: super-blocks of 256 numbers whose 8 or 16 sub-blocks have small integer scales.

Functions as in `ggml_simple`: f32 [n, 256] from a structured array of n blocks, bit for bit as ggml-quants.c.
"""

from __future__ import annotations

import numpy as np

from llmjax.checkpoint.ggml_simple import column, nibbles


def _two_bits(qs: np.ndarray) -> np.ndarray:
    """uint8 [n, 2, 4, 32] of bytes [n, 64]: in each half of a block, 4 runs of 32 take 2 bits of the same 32 bytes."""
    codes: np.ndarray = qs.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes &= 3
    return codes


def unpack_q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scales = blocks["scales"]
    out[...] = _two_bits(blocks["qs"]).reshape(-1, 256)
    quants = out.reshape(-1, 16, 16)
    quants *= (column(blocks["d"]) * (scales & 15))[:, :, None]
    quants -= (column(blocks["dmin"]) * (scales >> 4))[:, :, None]


def unpack_q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Bit s of mask byte l is the third bit of element l of run s; scales are split into 4 low and 2 high bits."""
    low, high = blocks["scales"][:, :8], blocks["scales"][:, 8:]
    top = high[:, None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = np.concatenate([low & 15, low >> 4], axis=1) | top.reshape(-1, 16) << 4
    third = blocks["hmask"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]
    third &= 1
    third <<= 2
    out[...] = (_two_bits(blocks["qs"]).reshape(-1, 8, 32) | third).reshape(-1, 256)
    out -= 4
    quants = out.reshape(-1, 16, 16)
    quants *= (column(blocks["d"]) * (scales.astype(np.float32) - 32))[:, :, None]


def _apply_k_scales(blocks: np.ndarray, out: np.ndarray) -> None:
    """The shared end of Q4_K and Q5_K: d * scale * q - dmin * min, 8 sub-blocks with 6-bit scales and minima.

    The first four scales and minima are the low six bits of bytes 0-3 and 4-7; the last four take their low
    halves from the nibbles of bytes 8-11 and their top two bits from those of bytes 0-3 and 4-7.
    """
    packed = blocks["scales"].reshape(-1, 3, 4)
    first, second, third = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    quants = out.reshape(-1, 8, 32)
    quants *= (column(blocks["d"]) * scales)[:, :, None]
    quants -= (column(blocks["dmin"]) * minima)[:, :, None]


def unpack_q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    nibbles(blocks["qs"].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))
    _apply_k_scales(blocks, out)


def unpack_q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    codes = np.empty((len(blocks), 8, 32), np.uint8)
    nibbles(blocks["qs"].reshape(-1, 4, 32), codes.reshape(-1, 4, 2, 32))
    fifth = blocks["qh"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]  # bit s belongs to sub-block s
    fifth &= 1
    fifth <<= 4
    codes |= fifth
    out[...] = codes.reshape(-1, 256)
    _apply_k_scales(blocks, out)


def unpack_q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    codes = np.empty((len(blocks), 2, 4, 32), np.uint8)
    nibbles(blocks["ql"].reshape(-1, 2, 64), codes.reshape(-1, 2, 2, 64))  # half of the block, nibble, byte
    top = blocks["qh"].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    top &= 3
    top <<= 4
    codes |= top
    out[...] = codes.reshape(-1, 256)
    out -= 32
    by_scale = out.reshape(-1, 16, 16)
    by_scale *= (column(blocks["d"]) * blocks["scales"])[:, :, None]
