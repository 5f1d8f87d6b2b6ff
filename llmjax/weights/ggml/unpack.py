"""Splits blocks of ggml's types into codes and scales.

Each function takes a structured array of n blocks (layouts: `types.GGML_TYPES`) and returns codes and scales, [n, …],
that stand for exactly the values of ggml's ``dequantize_row_*`` (ggml-quants.c). The type's `RowFormat` in the same
table defines what they mean.

* Q4_0 to Q8_0, Q1_0, Q2_0, IQ4_NL, MXFP4, NVFP4, TQ1_0, TQ2_0: blocks with one scale.
* K-quants and IQ4_XS: super-blocks of 256 numbers whose 8 or 16 sub-blocks have small integer scales.
* IQ1 to IQ3: indices into fixed grids of vectors of 4 or 8 numbers. A byte of signs (or 7 bits of it, where the eighth
  makes the number of minus signs even) negates some numbers of a vector, or one bit shifts a group of them; small odd
  scales apply to 16 or 32 numbers. The grids hold few distinct numbers, so a number is a code of 3 or 4 bits: twice its
  rank among the grid's numbers, plus the bit of sign or shift.

The grids are ggml's published constants ``iq2xxs_grid``, ``iq2xs_grid``, ``iq2s_grid``, ``iq3xxs_grid``,
``iq3s_grid`` and ``iq1s_grid`` (ggml-common.h, MIT license, https://github.com/ggml-org/ggml), kept in grids.npz
as 8-bit integers [vectors, 4 or 8].
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import numpy as np

from llmjax.weights.rows import CODE_DTYPES, E2M1_LEVELS, NUMBER_DTYPES

Fields = dict[str, np.ndarray]
"""Arrays of `QuantizedRows` by name, a row for each block."""

IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The numbers that codes of IQ4_NL and IQ4_XS stand for (``kvalues_iq4nl``)."""

FP4_DOUBLED = 2 * np.array(E2M1_LEVELS, np.float32) + 0
"""Twice the values of E2M1, as in ggml: code 8 is 0 and not -0."""


def copied(field: np.ndarray) -> np.ndarray:
    """A contiguous copy of a field's bytes, uint8 [n, b]; b bytes at a time are ten times as fast as single ones."""
    return field.view(f"V{field.shape[1]}").copy().view(np.uint8)


def runs(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes from bytes that hold one code of each run: the lowest bits of b bytes are the first b codes, and so on.

    Args:
        packed: uint8 [n, b], contiguous.

    Returns:
        uint8 [n, 8 / bits * b].
    """
    run = np.dtype(f"V{packed.shape[1]}")
    # Shifts of bytes are slow; in words, masks remove the bits from the next byte.
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
    """The bits of bytes [n, b] as uint8 [n, 8 b], the lowest bit of each byte first."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def one(field: np.ndarray) -> np.ndarray:
    """A number of each block as a column, [n, 1]."""
    return field[:, None]


def q4_0(blocks: np.ndarray) -> Fields:
    return {"codes": runs(copied(blocks["qs"]), 4), "scales": one(blocks["d"])}


def q4_1(blocks: np.ndarray) -> Fields:
    return q4_0(blocks) | {"minima": -one(blocks["m"])}


def q5_0(blocks: np.ndarray) -> Fields:
    """Q5_0: bit j of qh is the fifth bit of element j."""
    fields = q4_0(blocks)
    fields["codes"] |= bits_in_order(copied(blocks["qh"])) << 4
    return fields


def q5_1(blocks: np.ndarray) -> Fields:
    return q5_0(blocks) | {"minima": -one(blocks["m"])}


def q8_0(blocks: np.ndarray) -> Fields:
    return {"codes": copied(blocks["qs"]).view(CODE_DTYPES["int"]), "scales": one(blocks["d"])}


def q1_0(blocks: np.ndarray) -> Fields:
    return {"codes": bits_in_order(copied(blocks["qs"])), "scales": one(blocks["d"])}


def q2_0(blocks: np.ndarray) -> Fields:
    codes = runs(copied(blocks["qs"]).reshape(-1, 1), 2)
    return {"codes": codes.reshape(len(blocks), -1), "scales": one(blocks["d"])}


def mxfp4(blocks: np.ndarray) -> Fields:
    """MXFP4: exponent 255 is not a number in OCP MX; ggml, which never writes it, would read it as 2^128."""
    return {"codes": runs(copied(blocks["qs"]), 4), "scales": one(blocks["e"]).view(NUMBER_DTYPES["e8m0"])}


def nvfp4(blocks: np.ndarray) -> Fields:
    """NVFP4: runs of 16 have unsigned E4M3 scales; ggml reads the last code as 0, and the top bit is ignored."""
    scales = copied(blocks["d"])
    not_a_number = scales > 0x7F
    scales[scales == 0x7F] = 0
    scales[not_a_number] = 0x7F
    codes = runs(copied(blocks["qs"]).reshape(-1, 8), 4)
    return {"codes": codes.reshape(len(blocks), -1), "scales": scales.view(NUMBER_DTYPES["e4m3"])}


def tq1_0(blocks: np.ndarray) -> Fields:
    """TQ1_0: a byte holds five base-3 digits as a fraction of 256; the top digit of the byte times 3^k is digit k."""
    codes = np.empty((len(blocks), 256), np.uint8)
    start = 0
    for packed, digits in ((blocks["qs"][:, :32], 5), (blocks["qs"][:, 32:], 5), (blocks["qh"], 4)):
        for power in range(digits):
            fraction = packed * np.uint8(3**power)  # wraps around at 256
            codes[:, start : start + packed.shape[1]] = fraction.astype(np.uint16) * 3 >> 8
            start += packed.shape[1]
    return {"codes": codes, "scales": one(blocks["d"])}


def tq2_0(blocks: np.ndarray) -> Fields:
    codes = runs(copied(blocks["qs"]).reshape(-1, 32), 2)
    return {"codes": codes.reshape(len(blocks), -1), "scales": one(blocks["d"])}


def _codes(packed: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Unpacks bytes [n, b] to codes uint8 [n, 256]: each `run` of bytes holds ``bits`` bits of the codes of several
    consecutive runs."""
    return runs(packed.reshape(-1, run), bits).reshape(len(packed), -1)


def q2_k(blocks: np.ndarray) -> Fields:
    scales = copied(blocks["scales"])
    return {
        "codes": _codes(copied(blocks["qs"]), 32, 2),
        "scales": scales & 15,
        "minima": scales >> 4,
        "super_scales": one(blocks["d"]),
        "super_minima": one(blocks["dmin"]),
    }


def q3_k(blocks: np.ndarray) -> Fields:
    """Q3_K: bit s of mask byte l is the third bit of element l of run s; scales have 4 low and 2 high bits."""
    packed = copied(blocks["scales"])
    scales = runs(packed[:, :8].copy(), 4) | runs(packed[:, 8:].copy(), 2) << 4
    third = runs(copied(blocks["hmask"]), 1)
    third <<= 2
    third |= _codes(copied(blocks["qs"]), 32, 2)
    return {"codes": third, "scales": (scales - 32).view(np.int8), "super_scales": one(blocks["d"])}


def q4_k(blocks: np.ndarray) -> Fields:
    """Q4_K: eight sub-blocks with 6-bit scales and minima.

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


def q5_k(blocks: np.ndarray) -> Fields:
    """Q5_K: Q4_K, and bit s of qh byte l is the fifth bit of element l of sub-block s."""
    fields = q4_k(blocks)
    fifth = runs(copied(blocks["qh"]), 1)
    fifth <<= 4
    fields["codes"] |= fifth
    return fields


def q6_k(blocks: np.ndarray) -> Fields:
    codes = _codes(copied(blocks["qh"]), 32, 2)
    codes <<= 4
    codes |= _codes(copied(blocks["ql"]), 64, 4)
    return {"codes": codes, "scales": copied(blocks["scales"]).view(np.int8), "super_scales": one(blocks["d"])}


def iq4_xs(blocks: np.ndarray) -> Fields:
    top = one(blocks["scales_h"]) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = runs(copied(blocks["scales_l"]).reshape(-1, 1), 4).reshape(-1, 8)
    scales = low + (top.astype(np.uint8) << 4) - 32
    return {
        "codes": _codes(copied(blocks["qs"]), 16, 4),
        "scales": scales.view(np.int8),
        "super_scales": one(blocks["d"]),
    }


def _signed(*numbers: float) -> tuple[float, ...]:
    return tuple(sign * number for number in numbers for sign in (1, -1))


IQ2_LEVELS = _signed(8, 25, 43)
IQ3_XXS_LEVELS = _signed(4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S_LEVELS = _signed(1, 3, 5, 7, 9, 11, 13, 15)
IQ1_LEVELS = (-7.0, -9.0, 1.0, -1.0, 9.0, 7.0)
"""Eight times -1, 0 and 1, shifted by 1/8 up and down."""


@cache
def grid(name: str) -> np.ndarray:
    """The vectors of a grid (``iq2xxs`` …), int8 [vectors, 4 or 8]."""
    with (resources.files("llmjax.weights.ggml") / "grids.npz").open("rb") as file, np.load(file) as grids:
        return np.asarray(grids[name], np.int8)


@cache
def _grid_codes(name: str) -> np.ndarray:
    """The codes of the vectors of a grid, a byte each: uint32 or uint64 [vectors]."""
    vectors = grid(name)
    codes = (2 * np.searchsorted(np.unique(vectors), vectors)).astype(np.uint8)
    return codes.view(f"u{vectors.shape[1]}")[:, 0]


@cache
def _sign_bits() -> np.ndarray:
    """The bits of each byte value, a byte for each bit: uint64 [256]."""
    return bits_in_order(np.arange(256, dtype=np.uint8)[:, None]).view(np.uint64)[:, 0]


@cache
def _even_sign_bits() -> np.ndarray:
    """The same for 7 bits, with an eighth bit that makes the number of minus signs even: uint64 [128]."""
    bits = bits_in_order(np.arange(128, dtype=np.uint8)[:, None])
    bits[:, 7] = bits.sum(axis=1) & 1
    return bits.view(np.uint64)[:, 0]


def _indexed_codes(name: str, index: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Codes uint8 [n, 256] from indices into a grid, [n, vectors], and the bits to add to the codes, uint64 [n, 32]."""
    codes = _grid_codes(name).take(index).view(np.uint64)
    codes |= bits
    return codes.view(np.uint8)


def _seven_bits(words: np.ndarray) -> np.ndarray:
    """The four lowest 7-bit fields of 32-bit words [n, 8], as [n, 32]."""
    fields = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    return fields.reshape(len(words), -1)


def _halves(packed: np.ndarray) -> np.ndarray:
    """The low and high half of each byte of [n, b] in turn, uint8 [n, 2 b]."""
    return runs(packed.reshape(-1, 1), 4).reshape(len(packed), -1)


def _odd(scales: np.ndarray) -> np.ndarray:
    return (2 * scales + 1).astype(np.uint8)


def _fraction(d: np.ndarray, denominator: int) -> np.ndarray:
    """A fraction of each block's scale, in f32, because f16 cannot hold a fraction of its smallest numbers."""
    with np.errstate(invalid="ignore"):  # inf and nan get a better message later
        return one(d).astype(np.float32) * np.float32(1 / denominator)


def iq2_xxs(blocks: np.ndarray) -> Fields:
    words = blocks["groups"]["signs"]
    index = blocks["groups"]["index"].reshape(-1, 32)
    return {
        "codes": _indexed_codes("iq2xxs", index, _even_sign_bits().take(_seven_bits(words))),
        "scales": _odd(words >> 28),
        "super_scales": _fraction(blocks["d"], 8),
    }


def iq2_xs(blocks: np.ndarray) -> Fields:
    words = blocks["qs"]
    return {
        "codes": _indexed_codes("iq2xs", words & 511, _even_sign_bits().take(words >> 9)),
        "scales": _odd(_halves(copied(blocks["scales"]))),
        "super_scales": _fraction(blocks["d"], 8),
    }


def iq2_s(blocks: np.ndarray) -> Fields:
    top = (blocks["qh"][:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, 32)
    index = blocks["qs"] | top.astype(np.uint16) << 8
    return {
        "codes": _indexed_codes("iq2s", index, _sign_bits().take(blocks["signs"])),
        "scales": _odd(_halves(copied(blocks["scales"]))),
        "super_scales": _fraction(blocks["d"], 8),
    }


def iq3_xxs(blocks: np.ndarray) -> Fields:
    words = blocks["scales_signs"]
    return {
        "codes": _indexed_codes("iq3xxs", blocks["qs"], _even_sign_bits().take(_seven_bits(words))),
        "scales": _odd(words >> 28),
        "super_scales": _fraction(blocks["d"], 4),
    }


def iq3_s(blocks: np.ndarray) -> Fields:
    index = blocks["qs"] | bits_in_order(copied(blocks["qh"])).astype(np.uint16) << 8
    return {
        "codes": _indexed_codes("iq3s", index, _sign_bits().take(blocks["signs"])),
        "scales": _odd(_halves(copied(blocks["scales"]))),
        "super_scales": one(blocks["d"]),
    }


def _shifts(minus: np.ndarray) -> np.ndarray:
    """The bits to add for shifted groups, from booleans [n, groups]: uint64 [n, 32], a 1 in each byte of a group."""
    ones = minus.astype(np.uint64) * np.uint64(0x0101010101010101)
    return ones.repeat(32 // minus.shape[1], axis=1)


def iq1_s(blocks: np.ndarray) -> Fields:
    high = blocks["qh"]
    top = (high[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
    return {
        "codes": _indexed_codes("iq1s", blocks["qs"] | top << 8, _shifts(high >> 15)),
        "scales": _odd(high >> 12 & 7),
        "super_scales": _fraction(blocks["d"], 8),
    }


def iq1_m(blocks: np.ndarray) -> Fields:
    """IQ1_M: the block's scale is spread over the top nibbles of the four words that hold the 3-bit scales."""
    words = blocks["scales"].astype(np.uint16)
    parts = (words & 0xF000) >> np.arange(12, -1, -4, dtype=np.uint16)
    whole = np.bitwise_or.reduce(parts, axis=1).view(np.float16)
    scales = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 16)
    high = _halves(copied(blocks["qh"]))
    index = blocks["qs"] | (high & 7).astype(np.uint16) << 8
    return {
        "codes": _indexed_codes("iq1s", index, _shifts(high >> 3)),
        "scales": _odd(scales),
        "super_scales": _fraction(whole, 8),
    }
