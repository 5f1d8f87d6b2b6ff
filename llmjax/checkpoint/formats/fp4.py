"""4-bit floats, two E2M1 codes a byte, the lower half first: MXFP4 and NVFP4.

MXFP4 has an E8M0 scale for every 32 columns: weight = number(code) * 2^(scale - 127). In checkpoints with
``quant_method`` mxfp4 (gpt-oss) a weight X is ``X_blocks`` uint8 [..., out, groups, 16] and ``X_scales`` uint8
[..., out, groups]. Experts are read as [experts, out, in], though gpt-oss's files have them as [experts, in, out] where
they are not quantized.

NVFP4 has an E4M3 scale for every 16 columns, and one f32 scale for all: weight = number(code) * (scale * tensor scale).
ModelOpt stores the tensor scale itself, compressed-tensors its reciprocal.

Sources: OCP Microscaling Formats 1.0, transformers' integrations/mxfp4.py; the compressed-tensors package,
compressors/nvfp4; vLLM's quantization/modelopt.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmjax.checkpoint.formats.layout import Layout, StoredRows
from llmjax.checkpoint.formats.quantized import Module, QuantizedTensor, QuantSettings
from llmjax.kernels.row_format import Codes
from llmjax.weights.bits import unpack_bits
from llmjax.weights.rows import E2M1_LEVELS, NUMBER_DTYPES

MXFP4_GROUP = 32
E8M0_NAN = 255
FP4 = Codes(4, levels=E2M1_LEVELS)


@dataclass(frozen=True, eq=False)
class _PackedCodes:
    """Attributes: `packed` uint8 [out, in / 2]."""

    packed: np.ndarray

    row_step = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    def codes(self, start: int, stop: int) -> np.ndarray:
        """The codes of some rows, uint8 [stop - start, in]."""
        return unpack_bits(self.packed[start:stop], 4, self.shape[1])


@dataclass(frozen=True, eq=False)
class MXFP4Planes(_PackedCodes):
    """Attributes: `exponents` uint8 [out, in / 32]."""

    exponents: np.ndarray

    @property
    def layout(self) -> Layout:
        return Layout(size_in=self.shape[1], codes=FP4, group_size=MXFP4_GROUP, scale="e8m0")

    def rows(self, start: int, stop: int) -> StoredRows:
        return StoredRows(
            codes=self.codes(start, stop),
            scales=self.exponents[start:stop].view(NUMBER_DTYPES["e8m0"]),
        )


def open_exponents(module: Module, part: str, *, dims: int | None = None) -> np.ndarray:
    """E8M0 scales as uint8, of the shape that they are stored in.

    Raises:
        CheckpointError: they are missing, of another type, do not have `dims` dimensions, or one is not a number.
    """
    # Files have exponents under their own type, or as bytes.
    exponents = module.array(part, "F8_E8M0", "U8", dims=dims).view(np.uint8)
    if (exponents == E8M0_NAN).any():
        module.fail("holds scales that are not a number", part)
    return exponents


@dataclass(frozen=True)
class MXFP4:
    """The reader of MXFP4, which has no settings."""

    name = "MXFP4"
    parts = ("_blocks", "_scales")
    plain_part = "_blocks"

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> MXFP4:
        return cls()

    def is_quantized(self, module: Module) -> bool:
        return True

    def open(self, module: Module) -> QuantizedTensor:
        blocks = module.array("_blocks", "U8")
        exponents = open_exponents(module, "_scales")
        if blocks.ndim not in (3, 4) or blocks.shape[-1] * 2 != MXFP4_GROUP:
            module.fail(f"has shape {list(blocks.shape)}, not [..., out, groups, 16]", "_blocks")
        module.expect("_scales", blocks.shape[:-1], "one for each block")
        groups = blocks.shape[-2]
        planes = MXFP4Planes(blocks.reshape(-1, groups * 16), exponents.reshape(-1, groups))
        return module.quantized("MXFP4", planes, ending="", experts=blocks.shape[0] if blocks.ndim == 4 else 0)


NVFP4_GROUP = 16


@dataclass(frozen=True, eq=False)
class NVFP4Planes(_PackedCodes):
    """Attributes: `scales` E4M3 [out, in / 16]; `tensor_scale` f32."""

    scales: np.ndarray
    tensor_scale: np.float32

    @property
    def layout(self) -> Layout:
        return Layout(size_in=self.shape[1], codes=FP4, group_size=NVFP4_GROUP, scale="e4m3", super_scale="f32")

    def rows(self, start: int, stop: int) -> StoredRows:
        return StoredRows(
            codes=self.codes(start, stop),
            scales=self.scales[start:stop],
            super_scales=np.full((stop - start, 1), self.tensor_scale),
        )


def open_nvfp4(module: Module, *, packed: str, scales: str, tensor_scale: str, reciprocal: bool) -> NVFP4Planes:
    """Planes of a layer.

    Args:
        module: the layer.
        packed, scales, tensor_scale: its parts.
        reciprocal: whether `tensor_scale` is to be divided by.

    Raises:
        CheckpointError: a tensor is missing or malformed.
    """
    codes = module.array(packed, "U8", dims=2)
    by_group = module.array(scales, "F8_E4M3", dims=2)
    if codes.shape[1] * 2 % NVFP4_GROUP:
        module.fail(f"has {codes.shape[1] * 2} columns, not a multiple of {NVFP4_GROUP}", packed)
    module.expect(scales, (len(codes), codes.shape[1] * 2 // NVFP4_GROUP), f"groups of {NVFP4_GROUP}")
    module.check_finite(scales, by_group)
    whole = module.scales(tensor_scale)
    if whole.size != 1:
        module.fail(f"has shape {list(whole.shape)}, not one scale for the tensor", tensor_scale)
    number = np.float32(whole.item())
    if reciprocal:
        with np.errstate(divide="ignore", over="ignore"):
            number = np.float32(1) / number
        module.check_finite(tensor_scale, np.array(number))
    return NVFP4Planes(codes, by_group, number)
