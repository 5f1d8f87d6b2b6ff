"""Blocks of 32 numbers with one scale, and the ternary types: ggml's Q4_0 to Q8_0, IQ4_NL, MXFP4, TQ1_0, TQ2_0.

Each function fills f32 [n, elems] from a structured array of n blocks (layouts: `ggml.GGML_TYPES`), in the order
of operations of ggml's ``dequantize_row_*`` (ggml-quants.c), so that every bit of the result is the same.
"""

from __future__ import annotations

import numpy as np

IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""What a code of IQ4_NL and IQ4_XS stands for (``kvalues_iq4nl``)."""

FP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of E2M1, as ggml has them: code 8 is 0 and not -0."""


def column(field: np.ndarray) -> np.ndarray:
    """f32 [n, 1] of a scalar field, to be broadcast over a block."""
    return field.astype(np.float32)[:, None]


def nibbles(qs: np.ndarray, out: np.ndarray) -> None:
    """Low halves of bytes [..., b] into out[..., 0, b], high halves into out[..., 1, b]."""
    out[..., 0, :] = qs & 15
    out[..., 1, :] = qs >> 4


def unpack_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    nibbles(blocks["qs"], out.reshape(-1, 2, 16))
    out -= 8
    out *= column(blocks["d"])


def unpack_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    nibbles(blocks["qs"], out.reshape(-1, 2, 16))
    out *= column(blocks["d"])
    out += column(blocks["m"])


def _five_bits(blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 32]: nibbles with the fifth bits of Q5_0 and Q5_1; bit j of qh belongs to element j."""
    quants = np.empty((len(blocks), 32), np.uint8)
    nibbles(blocks["qs"], quants.reshape(-1, 2, 16))
    quants |= np.unpackbits(np.ascontiguousarray(blocks["qh"]), axis=1, bitorder="little") << 4
    return quants


def unpack_q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = _five_bits(blocks)
    out -= 16
    out *= column(blocks["d"])


def unpack_q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = _five_bits(blocks)
    out *= column(blocks["d"])
    out += column(blocks["m"])


def unpack_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks["qs"], column(blocks["d"]), out=out)


def unpack_iq4_nl(blocks: np.ndarray, out: np.ndarray) -> None:
    codes = np.empty((len(blocks), 2, 16), np.uint8)
    nibbles(blocks["qs"], codes)
    np.multiply(IQ4_LEVELS.take(codes.reshape(-1, 32)), column(blocks["d"]), out=out)


def unpack_mxfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    codes = np.empty((len(blocks), 2, 16), np.uint8)
    nibbles(blocks["qs"], codes)
    scale = np.ldexp(np.float32(1), blocks["e"].astype(np.int32) - 128)  # half of E8M0's 2^(e-127)
    np.multiply(FP4_DOUBLED.take(codes.reshape(-1, 32)), scale[:, None], out=out)


def unpack_tq1_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Five base-3 digits a byte, as a fraction of 256: the top digit of the byte times 3^k is digit k."""
    start = 0
    for codes, digits in ((blocks["qs"][:, :32], 5), (blocks["qs"][:, 32:], 5), (blocks["qh"], 4)):
        for power in range(digits):
            fraction = codes * np.uint8(3**power)  # wraps around at 256
            out[:, start : start + codes.shape[1]] = fraction.astype(np.uint16) * 3 >> 8
            start += codes.shape[1]
    out -= 1
    out *= column(blocks["d"])


def unpack_tq2_0(blocks: np.ndarray, out: np.ndarray) -> None:
    runs = blocks["qs"].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    out.reshape(-1, 2, 4, 32)[...] = runs & 3
    out -= 1
    out *= column(blocks["d"])
