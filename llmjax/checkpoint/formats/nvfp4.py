"""NVFP4: two E2M1 codes a byte, the lower half first, an E4M3 scale for every 16 columns, and one f32 scale for all.

    weight = number(code) * (scale * tensor scale)

ModelOpt stores the tensor scale itself, compressed-tensors its reciprocal. Sources: the compressed-tensors package,
compressors/nvfp4; vLLM's quantization/modelopt.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmjax.checkpoint.formats.layout import Layout, StoredRows
from llmjax.checkpoint.formats.mxfp4 import FP4
from llmjax.checkpoint.formats.quantized import Module
from llmjax.weights.bits import unpack_bits

GROUP = 16
U8, E4M3 = frozenset({"U8"}), frozenset({"F8_E4M3"})


@dataclass(frozen=True, eq=False)
class NVFP4Planes:
    """Attributes: `packed` uint8 [out, in / 2]; `scales` E4M3 [out, in / 16]; `tensor_scale` f32."""

    packed: np.ndarray
    scales: np.ndarray
    tensor_scale: np.float32

    row_step = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    @property
    def layout(self) -> Layout:
        return Layout(size_in=self.shape[1], codes=FP4, group_size=GROUP, scale="e4m3", super_scale="f32")

    def rows(self, start: int, stop: int) -> StoredRows:
        return StoredRows(
            codes=unpack_bits(self.packed[start:stop], 4, self.shape[1]),
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
    codes = module.array(packed, types=U8, dims=2)
    by_group = module.array(scales, types=E4M3, dims=2)
    if codes.shape[1] * 2 % GROUP:
        module.fail(f"has {codes.shape[1] * 2} columns, not a multiple of {GROUP}", packed)
    module.expect(scales, (len(codes), codes.shape[1] * 2 // GROUP), f"groups of {GROUP}")
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
