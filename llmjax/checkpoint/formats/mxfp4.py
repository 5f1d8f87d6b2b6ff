"""MXFP4 checkpoints with ``quant_method`` mxfp4 (gpt-oss).

A weight X is ``X_blocks`` uint8 [..., out, groups, 16], each byte two codes, the lower half first, and ``X_scales``
uint8 [..., out, groups], of E8M0: 32 E2M1 numbers times 2^(scale - 127). Experts are read as [experts, out, in], though
gpt-oss's files have them as [experts, in, out] where they are not quantised. Sources: OCP Microscaling Formats 1.0,
transformers' integrations/mxfp4.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmjax.checkpoint.formats.layout import Layout, StoredRows
from llmjax.checkpoint.formats.quant_settings import QuantSettings
from llmjax.checkpoint.formats.quantized import Module, QuantizedTensor
from llmjax.kernels.qtensor import Codes
from llmjax.weights.bits import unpack_bits
from llmjax.weights.rows import NUMBER_DTYPES

U8 = frozenset({"U8"})
E8M0 = frozenset({"F8_E8M0", *U8})  # files have exponents under their own type, or as bytes
GROUP = 32
E8M0_NAN = 255
FP4 = Codes(4, levels=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))


@dataclass(frozen=True, eq=False)
class MXFP4Planes:
    """Attributes: `packed` uint8 [out, in / 2]; `exponents` uint8 [out, in / 32]."""

    packed: np.ndarray
    exponents: np.ndarray

    row_step = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    @property
    def layout(self) -> Layout:
        return Layout(size_in=self.shape[1], codes=FP4, group_size=GROUP, scale="e8m0")

    def rows(self, start: int, stop: int) -> StoredRows:
        return StoredRows(
            codes=unpack_bits(self.packed[start:stop], 4, self.shape[1]),
            scales=self.exponents[start:stop].view(NUMBER_DTYPES["e8m0"]),
        )


def open_exponents(module: Module, part: str, *, dims: int | None = None) -> np.ndarray:
    """E8M0 scales as uint8, of the shape that they are stored in.

    Raises:
        CheckpointError: they are missing, of another type, do not have `dims` dimensions, or one is not a number.
    """
    exponents = module.array(part, types=E8M0, dims=dims).view(np.uint8)
    if (exponents == E8M0_NAN).any():
        module.fail("holds scales that are not a number", part)
    return exponents


@dataclass(frozen=True)
class MXFP4:
    """Nothing about this format is a setting."""

    name = "MXFP4"
    parts = ("_blocks", "_scales")
    plain_part = "_blocks"

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> MXFP4:
        return cls()

    def is_quantized(self, module: Module) -> bool:
        return True

    def open(self, module: Module) -> QuantizedTensor:
        blocks = module.array("_blocks", types=U8)
        exponents = open_exponents(module, "_scales")
        if blocks.ndim not in (3, 4) or blocks.shape[-1] * 2 != GROUP:
            module.fail(f"has shape {list(blocks.shape)}, not [..., out, groups, 16]", "_blocks")
        module.expect("_scales", blocks.shape[:-1], "one for each block")
        groups = blocks.shape[-2]
        planes = MXFP4Planes(blocks.reshape(-1, groups * 16), exponents.reshape(-1, groups))
        return module.quantized("MXFP4", planes, ending="", experts=blocks.shape[0] if blocks.ndim == 4 else 0)
