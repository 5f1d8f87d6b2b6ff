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

from llmjax.checkpoint import ggml_iq, ggml_k, ggml_simple
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


def _plain(name: str, native: type | np.dtype, stored: str) -> BlockType:
    layout = np.dtype(stored)
    return BlockType(name, 1, layout.itemsize, layout, None, np.dtype(native))


def _quantised(name: str, elems: int, unpack: Unpack, **fields: object) -> BlockType:
    layout = np.dtype(list(fields.items()))
    return BlockType(name, elems, layout.itemsize, layout, unpack)


F16 = "<f2"
IQ2_XXS_GROUP = [("index", "u1", (4,)), ("signs", "<u4")]


def _bytes(count: int) -> tuple[str, tuple[int]]:
    return ("u1", (count,))


GGML_TYPES: Mapping[int, BlockType] = MappingProxyType(
    {
        0: _plain("F32", np.float32, "<f4"),
        1: _plain("F16", np.float16, "<f2"),
        2: _quantised("Q4_0", 32, ggml_simple.unpack_q4_0, d=F16, qs=_bytes(16)),
        3: _quantised("Q4_1", 32, ggml_simple.unpack_q4_1, d=F16, m=F16, qs=_bytes(16)),
        6: _quantised("Q5_0", 32, ggml_simple.unpack_q5_0, d=F16, qh=_bytes(4), qs=_bytes(16)),
        7: _quantised("Q5_1", 32, ggml_simple.unpack_q5_1, d=F16, m=F16, qh=_bytes(4), qs=_bytes(16)),
        8: _quantised("Q8_0", 32, ggml_simple.unpack_q8_0, d=F16, qs=("i1", (32,))),
        9: BlockType("Q8_1", 32, 36),
        10: _quantised("Q2_K", 256, ggml_k.unpack_q2_k, scales=_bytes(16), qs=_bytes(64), d=F16, dmin=F16),
        11: _quantised("Q3_K", 256, ggml_k.unpack_q3_k, hmask=_bytes(32), qs=_bytes(64), scales=_bytes(12), d=F16),
        12: _quantised("Q4_K", 256, ggml_k.unpack_q4_k, d=F16, dmin=F16, scales=_bytes(12), qs=_bytes(128)),
        13: _quantised(
            "Q5_K", 256, ggml_k.unpack_q5_k, d=F16, dmin=F16, scales=_bytes(12), qh=_bytes(32), qs=_bytes(128)
        ),
        14: _quantised("Q6_K", 256, ggml_k.unpack_q6_k, ql=_bytes(128), qh=_bytes(64), scales=("i1", (16,)), d=F16),
        15: BlockType("Q8_K", 256, 292),
        16: _quantised("IQ2_XXS", 256, ggml_iq.unpack_iq2_xxs, d=F16, groups=(IQ2_XXS_GROUP, (8,))),
        17: _quantised("IQ2_XS", 256, ggml_iq.unpack_iq2_xs, d=F16, qs=("<u2", (32,)), scales=_bytes(8)),
        18: _quantised("IQ3_XXS", 256, ggml_iq.unpack_iq3_xxs, d=F16, qs=_bytes(64), scales_signs=("<u4", (8,))),
        19: _quantised("IQ1_S", 256, ggml_iq.unpack_iq1_s, d=F16, qs=_bytes(32), qh=("<u2", (8,))),
        20: _quantised("IQ4_NL", 32, ggml_simple.unpack_iq4_nl, d=F16, qs=_bytes(16)),
        21: _quantised(
            "IQ3_S", 256, ggml_iq.unpack_iq3_s, d=F16, qs=_bytes(64), qh=_bytes(8), signs=_bytes(32), scales=_bytes(4)
        ),
        22: _quantised(
            "IQ2_S", 256, ggml_iq.unpack_iq2_s, d=F16, qs=_bytes(32), signs=_bytes(32), qh=_bytes(8), scales=_bytes(8)
        ),
        23: _quantised("IQ4_XS", 256, ggml_iq.unpack_iq4_xs, d=F16, scales_h="<u2", scales_l=_bytes(4), qs=_bytes(128)),
        24: _plain("I8", np.int8, "<i1"),
        25: _plain("I16", np.int16, "<i2"),
        26: _plain("I32", np.int32, "<i4"),
        27: _plain("I64", np.int64, "<i8"),
        28: _plain("F64", np.float64, "<f8"),
        29: _quantised("IQ1_M", 256, ggml_iq.unpack_iq1_m, qs=_bytes(32), qh=_bytes(16), scales=("<u2", (4,))),
        30: _plain("BF16", ml_dtypes.bfloat16, "<u2"),
        34: _quantised("TQ1_0", 256, ggml_simple.unpack_tq1_0, qs=_bytes(48), qh=_bytes(4), d=F16),
        35: _quantised("TQ2_0", 256, ggml_simple.unpack_tq2_0, qs=_bytes(64), d=F16),
        39: _quantised("MXFP4", 32, ggml_simple.unpack_mxfp4, e="u1", qs=_bytes(16)),
        40: BlockType("NVFP4", 64, 36),
        41: BlockType("Q1_0", 128, 18),
        42: BlockType("Q2_0", 64, 18),
    }
)
"""Every type id that a GGUF file may hold, by id."""


def readable_types() -> list[str]:
    """Names of the types that `dequantize` reads."""
    return [block.name for block in GGML_TYPES.values() if block.layout is not None]
