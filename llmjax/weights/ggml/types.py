"""ggml tensor types: the layout of their blocks and the numbers that these stand for.

Layouts and formulas are those of ggml's ``block_q*`` structures (ggml-common.h, ggml-quants.c).
A layout is a structured NumPy dtype. A quantized block is split into codes and scales without loss; `QuantizedRows`
defines the weights that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import ml_dtypes
import numpy as np

from llmjax.errors import CheckpointError
from llmjax.kernels.row_format import Codes, RowFormat
from llmjax.weights.ggml import unpack
from llmjax.weights.ggml.unpack import Fields
from llmjax.weights.rows import QuantizedRows

Unpack = Callable[[np.ndarray], Fields]
"""A function that splits a structured array of n blocks into codes and scales."""

TILE = 1 << 15  # elements dequantized at a time: input, temporaries and f32 result stay in the L2 cache


@dataclass(frozen=True)
class BlockType:
    """One ggml type: `elems` consecutive values of a row in `nbytes` bytes.

    Attributes:
        name: ggml's name, for example ``Q4_K``.
        elems: values in a block.
        nbytes: bytes in a block.
        layout: little-endian dtype of a block; None for a type that is known but cannot be read.
        format: format of a row of one block; None for plain numbers, whose layout is the number itself.
        unpack: splits quantized blocks into codes and scales.
    """

    name: str
    elems: int
    nbytes: int
    layout: np.dtype | None = None
    format: RowFormat | None = None
    unpack: Unpack | None = None

    @property
    def native(self) -> np.dtype | None:
        """The dtype of plain numbers."""
        return self.layout if self.format is None else None

    def row_format(self, size_in: int) -> RowFormat | None:
        """The format of a row of `size_in` columns; None for plain numbers."""
        return self.format and replace(self.format, size_in=size_in)

    def quantized_rows(self, raw: np.ndarray, form: RowFormat) -> QuantizedRows:
        """Codes and scales of stored rows.

        Args:
            raw: uint8 [rows, bytes of a row], C-contiguous.
            form: the `row_format` of such rows.
        """
        assert self.layout is not None and self.unpack is not None
        blocks = raw.reshape(-1, self.nbytes)
        fields = self.unpack(blocks.view(self.layout)[:, 0])
        return QuantizedRows(form, **{name: values.reshape(len(raw), -1) for name, values in fields.items()})

    @property
    def type_id(self) -> int:
        """GGUF's number for the type."""
        return TYPE_IDS[self.name]

    @property
    def packs(self) -> bool:
        """Whether `pack` can be called: there are C++ kernels for the type."""
        from llmjax.kernels.cpu import packing  # not above: it imports JAX, which reading files does not need

        return packing.packs(self.type_id)

    def pack(self, raw: np.ndarray, form: RowFormat, words: np.ndarray) -> bool:
        """Packs stored rows into whole tiles, padded with zeros.

        Args:
            raw, form: see `quantized_rows`.
            words: u32 [tiles, words of a record, rows of a tile].

        Returns:
            Whether all scales are finite.
        """
        from llmjax.kernels.cpu import packing

        return packing.pack_blocks(raw, words, type_id=self.type_id, block_bytes=self.nbytes, form=form)


def dequantize(
    raw: np.ndarray,
    block: BlockType,
    dtype: np.dtype,
    *,
    row_order: np.ndarray | None = None,
) -> np.ndarray:
    """Dequantizes stored blocks.

    Values are computed in f32, exactly as ggml does, and rounded to nearest even if `dtype` is narrower.

    Args:
        raw: uint8 [rows, bytes of a row], C-contiguous.
        block: the stored type.
        dtype: float type of the result; integer types are read only as themselves.
        row_order: int [n]; row i of the result is stored row ``row_order[i]``. None: all rows in the stored order.

    Returns:
        `dtype` [n, elements of a row].

    Raises:
        CheckpointError: the type cannot be read, or cannot be converted to `dtype`.
    """
    if block.layout is None:
        raise CheckpointError(f"type {block.name} cannot be read; supported are {', '.join(readable_types())}")
    dtype = np.dtype(dtype)
    if block.native is not None and block.native.kind == "i" and block.native != dtype:
        raise CheckpointError(f"integers of type {block.name} cannot be read as {dtype}")

    rows, row_bytes = raw.shape
    result = np.empty((rows if row_order is None else len(row_order), row_bytes // block.nbytes * block.elems), dtype)
    # A unit is copied at a time: one block, or a whole row if rows are reordered.
    unit_bytes = block.nbytes if row_order is None else row_bytes
    units = raw.reshape(-1, unit_bytes)
    out = result.reshape(len(units) if row_order is None else len(row_order), -1)
    step = max(1, TILE // max(1, out.shape[1]))
    scratch = None if dtype == np.float32 else np.empty((min(step, len(out)), out.shape[1]), np.float32)

    with np.errstate(over="ignore", invalid="ignore"):  # inf and nan in a file are kept
        for start in range(0, len(out), step):
            target = out[start : start + step]
            taken = units[start : start + step] if row_order is None else units[row_order[start : start + step]]
            blocks = taken.reshape(-1, block.nbytes)
            if block.format is None:
                target[...] = blocks.view(block.layout).reshape(target.shape)
                continue
            tile = target if scratch is None else scratch[: len(target)]
            block.quantized_rows(blocks, block.format).dequantize(tile.reshape(-1, block.elems))
            if scratch is not None:
                target[...] = tile
    return result


def _plain(name: str, number: str | type) -> BlockType:
    layout = np.dtype(number)
    return BlockType(name, 1, layout.itemsize, layout)


def _quantized(name: str, form: RowFormat, unpack: Unpack, **fields: object) -> BlockType:
    layout = np.dtype(list(fields.items()))
    return BlockType(name, form.size_in, layout.itemsize, layout, form, unpack)


def _one_scale(size: int, codes: Codes, *, zero: int = 0, minimum: str = "") -> RowFormat:
    return RowFormat(size, codes, size, scale="f16", zero=zero, minimum=minimum)


def _two_levels(
    codes: Codes, group: int, *, scale: str = "u8", zero: int = 0, minimum: str = "", super_scale: str = "f16"
) -> RowFormat:
    """The format of blocks with small integer scales, which are multiples of one scale of the block."""
    return RowFormat(
        256, codes, group, scale=scale, zero=zero, minimum=minimum, super_size=256, super_scale=super_scale
    )


F16 = "<f2"
IQ2_XXS_GROUP = [("index", "u1", (4,)), ("signs", "<u4")]
IQ4 = Codes(4, levels=tuple(unpack.IQ4_LEVELS.tolist()))
FP4 = Codes(4, levels=tuple((unpack.FP4_DOUBLED / 2).tolist()))
TERNARY = _one_scale(256, Codes(2), zero=1)
Q2_K = _two_levels(Codes(2), 16, minimum="u8")
Q3_K = _two_levels(Codes(3), 16, scale="i8", zero=4)
Q4_K = _two_levels(Codes(4), 32, minimum="u8")
Q5_K = _two_levels(Codes(5), 32, minimum="u8")
Q6_K = _two_levels(Codes(6), 16, scale="i8", zero=32)
IQ1 = _two_levels(Codes(3, levels=unpack.IQ1_LEVELS), 16, super_scale="f32")
IQ2 = _two_levels(Codes(3, levels=unpack.IQ2_LEVELS), 16, super_scale="f32")
IQ3_XXS = _two_levels(Codes(4, levels=unpack.IQ3_XXS_LEVELS), 32, super_scale="f32")
IQ3_S = _two_levels(Codes(4, levels=unpack.IQ3_S_LEVELS), 32)
IQ4_XS = _two_levels(IQ4, 32, scale="i8")


def _bytes(count: int) -> tuple[str, tuple[int]]:
    return ("u1", (count,))


GGML_TYPES: Mapping[int, BlockType] = MappingProxyType(
    {
        0: _plain("F32", "<f4"),
        1: _plain("F16", "<f2"),
        2: _quantized("Q4_0", _one_scale(32, Codes(4), zero=8), unpack.q4_0, d=F16, qs=_bytes(16)),
        3: _quantized("Q4_1", _one_scale(32, Codes(4), minimum="f16"), unpack.q4_1, d=F16, m=F16, qs=_bytes(16)),
        6: _quantized("Q5_0", _one_scale(32, Codes(5), zero=16), unpack.q5_0, d=F16, qh=_bytes(4), qs=_bytes(16)),
        7: _quantized(
            "Q5_1", _one_scale(32, Codes(5), minimum="f16"), unpack.q5_1, d=F16, m=F16, qh=_bytes(4), qs=_bytes(16)
        ),
        8: _quantized("Q8_0", _one_scale(32, Codes(8, "int")), unpack.q8_0, d=F16, qs=("i1", (32,))),
        9: BlockType("Q8_1", 32, 36),
        10: _quantized("Q2_K", Q2_K, unpack.q2_k, scales=_bytes(16), qs=_bytes(64), d=F16, dmin=F16),
        11: _quantized("Q3_K", Q3_K, unpack.q3_k, hmask=_bytes(32), qs=_bytes(64), scales=_bytes(12), d=F16),
        12: _quantized("Q4_K", Q4_K, unpack.q4_k, d=F16, dmin=F16, scales=_bytes(12), qs=_bytes(128)),
        13: _quantized("Q5_K", Q5_K, unpack.q5_k, d=F16, dmin=F16, scales=_bytes(12), qh=_bytes(32), qs=_bytes(128)),
        14: _quantized("Q6_K", Q6_K, unpack.q6_k, ql=_bytes(128), qh=_bytes(64), scales=("i1", (16,)), d=F16),
        15: BlockType("Q8_K", 256, 292),
        16: _quantized("IQ2_XXS", replace(IQ2, group_size=32), unpack.iq2_xxs, d=F16, groups=(IQ2_XXS_GROUP, (8,))),
        17: _quantized("IQ2_XS", IQ2, unpack.iq2_xs, d=F16, qs=("<u2", (32,)), scales=_bytes(8)),
        18: _quantized("IQ3_XXS", IQ3_XXS, unpack.iq3_xxs, d=F16, qs=_bytes(64), scales_signs=("<u4", (8,))),
        19: _quantized("IQ1_S", replace(IQ1, group_size=32), unpack.iq1_s, d=F16, qs=_bytes(32), qh=("<u2", (8,))),
        20: _quantized("IQ4_NL", _one_scale(32, IQ4), unpack.q4_0, d=F16, qs=_bytes(16)),
        21: _quantized(
            "IQ3_S", IQ3_S, unpack.iq3_s, d=F16, qs=_bytes(64), qh=_bytes(8), signs=_bytes(32), scales=_bytes(4)
        ),
        22: _quantized(
            "IQ2_S", IQ2, unpack.iq2_s, d=F16, qs=_bytes(32), signs=_bytes(32), qh=_bytes(8), scales=_bytes(8)
        ),
        23: _quantized("IQ4_XS", IQ4_XS, unpack.iq4_xs, d=F16, scales_h="<u2", scales_l=_bytes(4), qs=_bytes(128)),
        24: _plain("I8", "<i1"),
        25: _plain("I16", "<i2"),
        26: _plain("I32", "<i4"),
        27: _plain("I64", "<i8"),
        28: _plain("F64", "<f8"),
        29: _quantized("IQ1_M", IQ1, unpack.iq1_m, qs=_bytes(32), qh=_bytes(16), scales=("<u2", (4,))),
        30: _plain("BF16", ml_dtypes.bfloat16),
        34: _quantized("TQ1_0", TERNARY, unpack.tq1_0, qs=_bytes(48), qh=_bytes(4), d=F16),
        35: _quantized("TQ2_0", TERNARY, unpack.tq2_0, qs=_bytes(64), d=F16),
        39: _quantized("MXFP4", RowFormat(32, FP4, 32, scale="e8m0"), unpack.mxfp4, e="u1", qs=_bytes(16)),
        40: _quantized("NVFP4", RowFormat(64, FP4, 16, scale="e4m3"), unpack.nvfp4, d=_bytes(4), qs=_bytes(32)),
        41: _quantized("Q1_0", _one_scale(128, Codes(1, levels=(-1, 1))), unpack.q1_0, d=F16, qs=_bytes(16)),
        42: _quantized("Q2_0", _one_scale(64, Codes(2), zero=1), unpack.q2_0, d=F16, qs=_bytes(16)),
    }
)
"""Every type id that a GGUF file may hold, by id."""


TYPE_IDS: Mapping[str, int] = MappingProxyType({block.name: number for number, block in GGML_TYPES.items()})
"""Type ids by name."""


def readable_types() -> list[str]:
    """Names of the types that `dequantize` reads."""
    return [block.name for block in GGML_TYPES.values() if block.layout is not None]
