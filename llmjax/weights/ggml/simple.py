"""Blocks with one scale: ggml's Q4_0 to Q8_0, Q1_0, Q2_0, IQ4_NL, MXFP4, NVFP4, TQ1_0, TQ2_0; and the shared tools.

Each function takes a structured array of n blocks (layouts: `ggml.GGML_TYPES`) and gives codes and scales, [n, …],
that stand for exactly the values of ggml's ``dequantize_row_*`` (ggml-quants.c). What they mean is said by the type's
`RowFormat` in the same table.
"""

from __future__ import annotations

import numpy as np

from llmjax.weights.rows import CODE_DTYPES, NUMBER_DTYPES

Parts = dict[str, np.ndarray]
"""Arrays of `QuantizedRows` by name, a row for each block."""

IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""What a code of IQ4_NL and IQ4_XS stands for (``kvalues_iq4nl``)."""

FP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of E2M1, as ggml has them: code 8 is 0 and not -0."""


def copied(field: np.ndarray) -> np.ndarray:
    """The bytes of a field side by side: uint8 [n, b]; ten times as fast by b bytes at a time as by single ones."""
    return field.view(f"V{field.shape[1]}").copy().view(np.uint8)


def runs(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes from bytes that hold one of each run: the lowest bits of b bytes are the first b codes, and so on.

    Args:
        packed: uint8 [n, b], contiguous.

    Returns:
        uint8 [n, 8 / bits * b].
    """
    run = np.dtype(f"V{packed.shape[1]}")
    # Shifts of bytes are slow; in words, masks take what comes from the next byte.
    word = np.dtype(np.uint64 if run.itemsize % 8 == 0 else np.uint8)
    mask = np.frombuffer(bytes([(1 << bits) - 1] * word.itemsize), word)
    words = packed.view(word)
    codes = np.empty((len(packed), 8 // bits), run)
    for index in range(8 // bits):
        part = words >> word.type(bits * index)
        part &= mask
        codes[:, index] = part.view(run)[:, 0]
    return codes.view(np.uint8)


def bits_in_order(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, 8 b]: the bits of bytes [n, b], the lowest of each first."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def one(field: np.ndarray) -> np.ndarray:
    """A number of each block as a column, [n, 1]."""
    return field[:, None]


def q4_0(blocks: np.ndarray) -> Parts:
    return {"codes": runs(copied(blocks["qs"]), 4), "scales": one(blocks["d"])}


def q4_1(blocks: np.ndarray) -> Parts:
    return q4_0(blocks) | {"minima": -one(blocks["m"])}


def q5_0(blocks: np.ndarray) -> Parts:
    """Bit j of qh is the fifth of element j."""
    parts = q4_0(blocks)
    parts["codes"] |= bits_in_order(copied(blocks["qh"])) << 4
    return parts


def q5_1(blocks: np.ndarray) -> Parts:
    return q5_0(blocks) | {"minima": -one(blocks["m"])}


def q8_0(blocks: np.ndarray) -> Parts:
    return {"codes": copied(blocks["qs"]).view(CODE_DTYPES["int"]), "scales": one(blocks["d"])}


def q1_0(blocks: np.ndarray) -> Parts:
    return {"codes": bits_in_order(copied(blocks["qs"])), "scales": one(blocks["d"])}


def q2_0(blocks: np.ndarray) -> Parts:
    codes = runs(copied(blocks["qs"]).reshape(-1, 1), 2)
    return {"codes": codes.reshape(len(blocks), -1), "scales": one(blocks["d"])}


def mxfp4(blocks: np.ndarray) -> Parts:
    """Exponent 255 is not a number in OCP MX; ggml, which never writes it, would take it for 2^128."""
    return {"codes": runs(copied(blocks["qs"]), 4), "scales": one(blocks["e"]).view(NUMBER_DTYPES["e8m0"])}


def nvfp4(blocks: np.ndarray) -> Parts:
    """Scales of runs of 16 are E4M3 without a sign: ggml takes the last code for 0; the top bit is no part of them."""
    scales = copied(blocks["d"])
    not_a_number = scales > 0x7F
    scales[scales == 0x7F] = 0
    scales[not_a_number] = 0x7F
    codes = runs(copied(blocks["qs"]).reshape(-1, 8), 4)
    return {"codes": codes.reshape(len(blocks), -1), "scales": scales.view(NUMBER_DTYPES["e4m3"])}


def tq1_0(blocks: np.ndarray) -> Parts:
    """Five base-3 digits a byte, as a fraction of 256: the top digit of the byte times 3^k is digit k."""
    codes = np.empty((len(blocks), 256), np.uint8)
    start = 0
    for packed, digits in ((blocks["qs"][:, :32], 5), (blocks["qs"][:, 32:], 5), (blocks["qh"], 4)):
        for power in range(digits):
            fraction = packed * np.uint8(3**power)  # wraps around at 256
            codes[:, start : start + packed.shape[1]] = fraction.astype(np.uint16) * 3 >> 8
            start += packed.shape[1]
    return {"codes": codes, "scales": one(blocks["d"])}


def tq2_0(blocks: np.ndarray) -> Parts:
    codes = runs(copied(blocks["qs"]).reshape(-1, 32), 2)
    return {"codes": codes.reshape(len(blocks), -1), "scales": one(blocks["d"])}
