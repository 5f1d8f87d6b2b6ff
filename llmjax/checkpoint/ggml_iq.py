"""ggml's IQ types: 1 to 4 bits a number, as indices into fixed grids of vectors.

A grid index gives 4 or 8 numbers at once, a byte of signs (or 7 bits of it, where the eighth makes the number of
minus signs even) negates some, and small scales apply to 8, 16 or 32 numbers.

The grids are ggml's published constants ``iq2xxs_grid``, ``iq2xs_grid``, ``iq2s_grid``, ``iq3xxs_grid``,
``iq3s_grid`` and ``iq1s_grid`` (ggml-common.h, MIT licence, https://github.com/ggml-org/ggml), kept in ggml_grids.npz
as 8-bit integers [vectors, 4 or 8]. Functions as in `ggml_simple`, bit for bit as ggml-quants.c.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import numpy as np

from llmjax.checkpoint.ggml_simple import IQ4_LEVELS, column, nibbles

IQ1_DELTA = np.float32(0.125)


@cache
def grid(name: str) -> np.ndarray:
    """f32 [vectors, 4 or 8] of a grid: ``iq2xxs`` …"""
    with (resources.files("llmjax.checkpoint") / "ggml_grids.npz").open("rb") as file, np.load(file) as grids:
        return np.asarray(grids[name], np.float32)


def _vectors(name: str, index: np.ndarray) -> np.ndarray:
    return grid(name).take(index, axis=0)


@cache
def _sign_table() -> np.ndarray:
    """f32 [256, 8] of +1 and -1: bit j of a byte set means that number j is negated."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return 1 - 2 * bits.astype(np.float32)


@cache
def _even_sign_table() -> np.ndarray:
    """f32 [128, 8], for 7 bits whose eighth makes the number of minus signs even."""
    signs = _sign_table()[:128]
    return np.concatenate([signs[:, :7], signs.prod(axis=1, keepdims=True)], axis=1)


def _signs(index: np.ndarray) -> np.ndarray:
    return _sign_table().take(index, axis=0)


def _even_signs(index: np.ndarray) -> np.ndarray:
    return _even_sign_table().take(index, axis=0)


def _halves(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, 2 b]: low and high half of each byte of [n, b] in turn."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _seven_bits(words: np.ndarray) -> np.ndarray:
    """[n, 8, 4]: the four 7-bit fields at the bottom of 32-bit words [n, 8]."""
    fields: np.ndarray = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    return fields


def _combine(vectors: np.ndarray, signs: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """out = scale * vector * sign, with f32 scales [n, groups] and signs of 8 numbers each."""
    by_scale = out.reshape(*scales.shape, -1)
    np.multiply(vectors.reshape(by_scale.shape), scales[:, :, None], out=by_scale)
    out *= signs.reshape(out.shape)


def unpack_iq2_xxs(blocks: np.ndarray, out: np.ndarray) -> None:
    words = blocks["groups"]["signs"]
    scales = column(blocks["d"]) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.25)
    _combine(_vectors("iq2xxs", blocks["groups"]["index"]), _even_signs(_seven_bits(words)), scales, out)


def _scales_of_16(blocks: np.ndarray) -> np.ndarray:
    return column(blocks["d"]) * (np.float32(0.5) + _halves(blocks["scales"])) * np.float32(0.25)


def unpack_iq2_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    words = blocks["qs"]
    _combine(_vectors("iq2xs", words & 511), _even_signs(words >> 9), _scales_of_16(blocks), out)


def unpack_iq2_s(blocks: np.ndarray, out: np.ndarray) -> None:
    top = (blocks["qh"][:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, 32)
    index = blocks["qs"] | top.astype(np.uint16) << 8
    _combine(_vectors("iq2s", index), _signs(blocks["signs"]), _scales_of_16(blocks), out)


def unpack_iq3_xxs(blocks: np.ndarray, out: np.ndarray) -> None:
    words = blocks["scales_signs"]
    scales = column(blocks["d"]) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    _combine(_vectors("iq3xxs", blocks["qs"]), _even_signs(_seven_bits(words)), scales, out)


def unpack_iq3_s(blocks: np.ndarray, out: np.ndarray) -> None:
    ninth = np.unpackbits(np.ascontiguousarray(blocks["qh"]), axis=1, bitorder="little")
    index = blocks["qs"] | ninth.astype(np.uint16) << 8
    scales = column(blocks["d"]) * (1 + 2 * _halves(blocks["scales"]))
    _combine(_vectors("iq3s", index), _signs(blocks["signs"]), scales, out)


def _combine_shifted(vectors: np.ndarray, minus: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """out = scale * (vector - 1/8 where `minus` else + 1/8), with f32 scales and truth values [n, groups]."""
    by_delta = out.reshape(*minus.shape, -1)
    delta = np.where(minus, -IQ1_DELTA, IQ1_DELTA)
    np.add(vectors.reshape(by_delta.shape), delta[:, :, None], out=by_delta)
    by_scale = out.reshape(*scales.shape, -1)
    by_scale *= scales[:, :, None]


def unpack_iq1_s(blocks: np.ndarray, out: np.ndarray) -> None:
    high = blocks["qh"]
    top = (high[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
    scales = column(blocks["d"]) * (2 * (high >> 12 & 7) + 1)
    _combine_shifted(_vectors("iq1s", blocks["qs"] | top << 8), high >> 15 != 0, scales, out)


def unpack_iq1_m(blocks: np.ndarray, out: np.ndarray) -> None:
    """The block's scale is spread over the top nibbles of the four words that hold the 3-bit scales."""
    words = blocks["scales"].astype(np.uint16)
    parts = (words & 0xF000) >> np.arange(12, -1, -4, dtype=np.uint16)
    whole = np.bitwise_or.reduce(parts, axis=1).view(np.float16)
    scales = column(whole) * (2 * (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7) + 1).reshape(-1, 16)
    high = _halves(blocks["qh"])
    index = blocks["qs"] | (high & 7).astype(np.uint16) << 8
    _combine_shifted(_vectors("iq1s", index), high & 8 != 0, scales, out)


def unpack_iq4_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    top = (blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    scales = (_halves(blocks["scales_l"]) | top << 4).astype(np.float32) - 32
    codes = np.empty((len(blocks), 8, 2, 16), np.uint8)
    nibbles(blocks["qs"].reshape(-1, 8, 16), codes)
    by_scale = out.reshape(-1, 8, 32)
    np.multiply(IQ4_LEVELS.take(codes.reshape(-1, 8, 32)), (column(blocks["d"]) * scales)[:, :, None], out=by_scale)
