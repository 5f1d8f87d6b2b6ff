"""ggml tensor types: how their blocks are laid out and what numbers they stand for.

Layouts and formulas are those of ggml's ``block_q*`` structures (ggml-common.h, ggml-quants.c).
A layout is a structured NumPy dtype, so that a big-endian file needs nothing but another byte order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import ml_dtypes
import numpy as np

from llmjax.errors import CheckpointError

Unpack = Callable[[np.ndarray, np.ndarray], None]
"""Fills f32 [n, elems] from a structured array of n blocks."""

TILE = 1 << 15  # elements dequantised at a time: input, temporaries and f32 result stay in the L2 cache


@dataclass(frozen=True)
class BlockType:
    """One ggml type: `elems` consecutive values of a row in `nbytes` bytes.

    Attributes:
        name: ggml's name, for example ``Q4_K``.
        elems: values in a block.
        nbytes: bytes in a block.
        layout: little-endian dtype of a block; None for a type that is known but cannot be read.
        unpack: dequantises blocks; None for plain numbers, whose layout is the number itself.
        native: dtype of plain numbers in memory.
    """

    name: str
    elems: int
    nbytes: int
    layout: np.dtype | None = None
    unpack: Unpack | None = None
    native: np.dtype | None = None


def dequantize(
    raw: np.ndarray,
    block: BlockType,
    dtype: np.dtype,
    *,
    big_endian: bool = False,
    row_order: np.ndarray | None = None,
) -> np.ndarray:
    """The numbers that stored blocks stand for.

    Values are computed in f32, exactly as ggml does, and rounded to nearest even if `dtype` is narrower.

    Args:
        raw: uint8 [rows, bytes of a row], C-contiguous.
        block: the stored type.
        dtype: float type of the result; integer types are read only as themselves.
        big_endian: whether multi-byte fields are stored most significant byte first.
        row_order: int [rows]; row i of the result is stored row ``row_order[i]``. None: the stored order.

    Returns:
        `dtype` [rows, elements of a row].

    Raises:
        CheckpointError: the type cannot be read, or not as `dtype`.
    """
    if block.layout is None:
        raise CheckpointError(f"type {block.name} cannot be read; supported are {', '.join(readable_types())}")
    dtype = np.dtype(dtype)
    if block.native is not None and block.native.kind == "i" and block.native != dtype:
        raise CheckpointError(f"integers of type {block.name} cannot be read as {dtype}")
    layout = block.layout.newbyteorder(">") if big_endian else block.layout

    rows, row_bytes = raw.shape
    result = np.empty((rows, row_bytes // block.nbytes * block.elems), dtype)
    # A unit is what is copied at a time: one block, or a whole row where rows change places.
    unit_bytes = block.nbytes if row_order is None else row_bytes
    units = raw.reshape(-1, unit_bytes)
    out = result.reshape(len(units), -1)
    step = max(1, TILE // max(1, out.shape[1]))
    scratch = None if dtype == np.float32 else np.empty((min(step, len(out)), out.shape[1]), np.float32)

    with np.errstate(over="ignore", invalid="ignore"):  # inf and nan in a file stay what they are
        for start in range(0, len(units), step):
            target = out[start : start + step]
            taken = units[start : start + step] if row_order is None else units[row_order[start : start + step]]
            blocks = taken.reshape(-1, block.nbytes).view(layout)[:, 0]
            if block.unpack is None:
                _copy_plain(blocks, block, target.reshape(-1))
                continue
            tile = target if scratch is None else scratch[: len(target)]
            block.unpack(blocks, tile.reshape(-1, block.elems))
            if scratch is not None:
                target[...] = tile
    return result


def _copy_plain(stored: np.ndarray, block: BlockType, target: np.ndarray) -> None:
    if block.native == ml_dtypes.bfloat16:  # no byte order of its own: kept as 16-bit words until here
        stored = stored.astype(np.uint16, copy=False).view(ml_dtypes.bfloat16)
    target[...] = stored


def _f32(field: np.ndarray) -> np.ndarray:
    return field.astype(np.float32)[:, None]


def _nibbles(qs: np.ndarray, out: np.ndarray) -> None:
    """Low halves of bytes [..., b] into out[..., 0, b], high halves into out[..., 1, b]."""
    out[..., 0, :] = qs & 15
    out[..., 1, :] = qs >> 4


def _unpack_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks["qs"], out.reshape(-1, 2, 16))
    out -= 8
    out *= _f32(blocks["d"])


def _unpack_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks["qs"], out.reshape(-1, 2, 16))
    out *= _f32(blocks["d"])
    out += _f32(blocks["m"])


def _five_bits(blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 32]: nibbles with the fifth bits of Q5_0 and Q5_1; bit j of qh belongs to element j."""
    quants = np.empty((len(blocks), 32), np.uint8)
    _nibbles(blocks["qs"], quants.reshape(-1, 2, 16))
    quants |= np.unpackbits(np.ascontiguousarray(blocks["qh"]), axis=1, bitorder="little") << 4
    return quants


def _unpack_q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = _five_bits(blocks)
    out -= 16
    out *= _f32(blocks["d"])


def _unpack_q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = _five_bits(blocks)
    out *= _f32(blocks["d"])
    out += _f32(blocks["m"])


def _unpack_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks["qs"], _f32(blocks["d"]), out=out)


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
    quants *= (_f32(blocks["d"]) * scales)[:, :, None]
    quants -= (_f32(blocks["dmin"]) * minima)[:, :, None]


def _unpack_q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks["qs"].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))
    _apply_k_scales(blocks, out)


def _unpack_q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    codes = np.empty((len(blocks), 8, 32), np.uint8)
    _nibbles(blocks["qs"].reshape(-1, 4, 32), codes.reshape(-1, 4, 2, 32))
    fifth = blocks["qh"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]  # bit s belongs to sub-block s
    fifth &= 1
    fifth <<= 4
    codes |= fifth
    out[...] = codes.reshape(-1, 256)
    _apply_k_scales(blocks, out)


def _unpack_q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    codes = np.empty((len(blocks), 2, 4, 32), np.uint8)
    _nibbles(blocks["ql"].reshape(-1, 2, 64), codes.reshape(-1, 2, 2, 64))  # half of the block, nibble, byte
    top = blocks["qh"].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    top &= 3
    top <<= 4
    codes |= top
    out[...] = codes.reshape(-1, 256)
    out -= 32
    by_scale = out.reshape(-1, 16, 16)
    by_scale *= (_f32(blocks["d"]) * blocks["scales"])[:, :, None]


def _plain(name: str, native: type | np.dtype, stored: str) -> BlockType:
    layout = np.dtype(stored)
    return BlockType(name, 1, layout.itemsize, layout, None, np.dtype(native))


def _quantised(name: str, elems: int, unpack: Unpack, **fields: object) -> BlockType:
    layout = np.dtype(list(fields.items()))
    return BlockType(name, elems, layout.itemsize, layout, unpack)


F16 = "<f2"


def _bytes(count: int) -> tuple[str, tuple[int]]:
    return ("u1", (count,))


GGML_TYPES: Mapping[int, BlockType] = MappingProxyType(
    {
        0: _plain("F32", np.float32, "<f4"),
        1: _plain("F16", np.float16, "<f2"),
        2: _quantised("Q4_0", 32, _unpack_q4_0, d=F16, qs=_bytes(16)),
        3: _quantised("Q4_1", 32, _unpack_q4_1, d=F16, m=F16, qs=_bytes(16)),
        6: _quantised("Q5_0", 32, _unpack_q5_0, d=F16, qh=_bytes(4), qs=_bytes(16)),
        7: _quantised("Q5_1", 32, _unpack_q5_1, d=F16, m=F16, qh=_bytes(4), qs=_bytes(16)),
        8: _quantised("Q8_0", 32, _unpack_q8_0, d=F16, qs=("i1", (32,))),
        9: BlockType("Q8_1", 32, 36),
        10: BlockType("Q2_K", 256, 84),
        11: BlockType("Q3_K", 256, 110),
        12: _quantised("Q4_K", 256, _unpack_q4_k, d=F16, dmin=F16, scales=_bytes(12), qs=_bytes(128)),
        13: _quantised("Q5_K", 256, _unpack_q5_k, d=F16, dmin=F16, scales=_bytes(12), qh=_bytes(32), qs=_bytes(128)),
        14: _quantised("Q6_K", 256, _unpack_q6_k, ql=_bytes(128), qh=_bytes(64), scales=("i1", (16,)), d=F16),
        15: BlockType("Q8_K", 256, 292),
        16: BlockType("IQ2_XXS", 256, 66),
        17: BlockType("IQ2_XS", 256, 74),
        18: BlockType("IQ3_XXS", 256, 98),
        19: BlockType("IQ1_S", 256, 50),
        20: BlockType("IQ4_NL", 32, 18),
        21: BlockType("IQ3_S", 256, 110),
        22: BlockType("IQ2_S", 256, 82),
        23: BlockType("IQ4_XS", 256, 136),
        24: _plain("I8", np.int8, "<i1"),
        25: _plain("I16", np.int16, "<i2"),
        26: _plain("I32", np.int32, "<i4"),
        27: _plain("I64", np.int64, "<i8"),
        28: _plain("F64", np.float64, "<f8"),
        29: BlockType("IQ1_M", 256, 56),
        30: _plain("BF16", ml_dtypes.bfloat16, "<u2"),
        34: BlockType("TQ1_0", 256, 54),
        35: BlockType("TQ2_0", 256, 66),
        39: BlockType("MXFP4", 32, 17),
        40: BlockType("NVFP4", 64, 36),
        41: BlockType("Q1_0", 128, 18),
        42: BlockType("Q2_0", 64, 18),
    }
)
"""Every type id that a GGUF file may hold, by id."""


def readable_types() -> list[str]:
    """Names of the types that `dequantize` reads."""
    return [block.name for block in GGML_TYPES.values() if block.layout is not None]
