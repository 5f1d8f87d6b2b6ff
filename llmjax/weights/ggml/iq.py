"""ggml's IQ1 to IQ3 types: indices into fixed grids of vectors of 4 or 8 numbers.

A byte of signs (or 7 bits of it, where the eighth makes the number of minus signs even) negates some numbers of a
vector, or one bit shifts a group of them; small odd scales apply to 16 or 32 numbers. The grids hold few distinct
numbers, so a number is a code of 3 or 4 bits: twice its rank among the grid's numbers, plus the bit of sign or shift.

The grids are ggml's published constants ``iq2xxs_grid``, ``iq2xs_grid``, ``iq2s_grid``, ``iq3xxs_grid``,
``iq3s_grid`` and ``iq1s_grid`` (ggml-common.h, MIT licence, https://github.com/ggml-org/ggml), kept in grids.npz
as 8-bit integers [vectors, 4 or 8]. Functions as in `ggml_simple`.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import numpy as np

from llmjax.weights.ggml.simple import Parts, bits_in_order, copied, one, runs


def _signed(*numbers: float) -> tuple[float, ...]:
    return tuple(sign * number for number in numbers for sign in (1, -1))


IQ2_LEVELS = _signed(8, 25, 43)
IQ3_XXS_LEVELS = _signed(4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S_LEVELS = _signed(1, 3, 5, 7, 9, 11, 13, 15)
IQ1_LEVELS = (-7.0, -9.0, 1.0, -1.0, 9.0, 7.0)
"""Eight times -1, 0 and 1, shifted by 1/8 up and down."""


@cache
def grid(name: str) -> np.ndarray:
    """int8 [vectors, 4 or 8] of a grid: ``iq2xxs`` …"""
    with (resources.files("llmjax.weights.ggml") / "grids.npz").open("rb") as file, np.load(file) as grids:
        return np.asarray(grids[name], np.int8)


@cache
def _grid_codes(name: str) -> np.ndarray:
    """uint32 or uint64 [vectors]: codes of the vectors of a grid, a byte each."""
    vectors = grid(name)
    codes = (2 * np.searchsorted(np.unique(vectors), vectors)).astype(np.uint8)
    return codes.view(f"u{vectors.shape[1]}")[:, 0]


@cache
def _sign_bits() -> np.ndarray:
    """uint64 [256]: the bits of a byte, a byte each."""
    return bits_in_order(np.arange(256, dtype=np.uint8)[:, None]).view(np.uint64)[:, 0]


@cache
def _even_sign_bits() -> np.ndarray:
    """uint64 [128], for 7 bits whose eighth makes the number of minus signs even."""
    bits = bits_in_order(np.arange(128, dtype=np.uint8)[:, None])
    bits[:, 7] = bits.sum(axis=1) & 1
    return bits.view(np.uint64)[:, 0]


def _codes(name: str, index: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """uint8 [n, 256] from indices into a grid [n, vectors] and what to add to codes: uint64 [n, 32]."""
    codes = _grid_codes(name).take(index).view(np.uint64)
    codes |= bits
    return codes.view(np.uint8)


def _seven_bits(words: np.ndarray) -> np.ndarray:
    """[n, 32]: the four 7-bit fields at the bottom of 32-bit words [n, 8]."""
    fields = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    return fields.reshape(len(words), -1)


def _halves(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, 2 b]: low and high half of each byte of [n, b] in turn."""
    return runs(packed.reshape(-1, 1), 4).reshape(len(packed), -1)


def _odd(scales: np.ndarray) -> np.ndarray:
    return (2 * scales + 1).astype(np.uint8)


def _fraction(d: np.ndarray, denominator: int) -> np.ndarray:
    """A part of each block's scale; f32, because f16 could not hold that of its small numbers."""
    with np.errstate(invalid="ignore"):  # for inf and nan there is a better message
        return one(d).astype(np.float32) * np.float32(1 / denominator)


def iq2_xxs(blocks: np.ndarray) -> Parts:
    words = blocks["groups"]["signs"]
    index = blocks["groups"]["index"].reshape(-1, 32)
    return {
        "codes": _codes("iq2xxs", index, _even_sign_bits().take(_seven_bits(words))),
        "scales": _odd(words >> 28),
        "super_scales": _fraction(blocks["d"], 8),
    }


def iq2_xs(blocks: np.ndarray) -> Parts:
    words = blocks["qs"]
    return {
        "codes": _codes("iq2xs", words & 511, _even_sign_bits().take(words >> 9)),
        "scales": _odd(_halves(copied(blocks["scales"]))),
        "super_scales": _fraction(blocks["d"], 8),
    }


def iq2_s(blocks: np.ndarray) -> Parts:
    top = (blocks["qh"][:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, 32)
    index = blocks["qs"] | top.astype(np.uint16) << 8
    return {
        "codes": _codes("iq2s", index, _sign_bits().take(blocks["signs"])),
        "scales": _odd(_halves(copied(blocks["scales"]))),
        "super_scales": _fraction(blocks["d"], 8),
    }


def iq3_xxs(blocks: np.ndarray) -> Parts:
    words = blocks["scales_signs"]
    return {
        "codes": _codes("iq3xxs", blocks["qs"], _even_sign_bits().take(_seven_bits(words))),
        "scales": _odd(words >> 28),
        "super_scales": _fraction(blocks["d"], 4),
    }


def iq3_s(blocks: np.ndarray) -> Parts:
    index = blocks["qs"] | bits_in_order(copied(blocks["qh"])).astype(np.uint16) << 8
    return {
        "codes": _codes("iq3s", index, _sign_bits().take(blocks["signs"])),
        "scales": _odd(_halves(copied(blocks["scales"]))),
        "super_scales": one(blocks["d"]),
    }


def _shifts(minus: np.ndarray) -> np.ndarray:
    """uint64 [n, 32] from truth values [n, groups]: a one in each byte of a group."""
    ones = minus.astype(np.uint64) * np.uint64(0x0101010101010101)
    return ones.repeat(32 // minus.shape[1], axis=1)


def iq1_s(blocks: np.ndarray) -> Parts:
    high = blocks["qh"]
    top = (high[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
    return {
        "codes": _codes("iq1s", blocks["qs"] | top << 8, _shifts(high >> 15)),
        "scales": _odd(high >> 12 & 7),
        "super_scales": _fraction(blocks["d"], 8),
    }


def iq1_m(blocks: np.ndarray) -> Parts:
    """The block's scale is spread over the top nibbles of the four words that hold the 3-bit scales."""
    words = blocks["scales"].astype(np.uint16)
    parts = (words & 0xF000) >> np.arange(12, -1, -4, dtype=np.uint16)
    whole = np.bitwise_or.reduce(parts, axis=1).view(np.float16)
    scales = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 16)
    high = _halves(copied(blocks["qh"]))
    index = blocks["qs"] | (high & 7).astype(np.uint16) << 8
    return {
        "codes": _codes("iq1s", index, _shifts(high >> 3)),
        "scales": _odd(scales),
        "super_scales": _fraction(whole, 8),
    }
