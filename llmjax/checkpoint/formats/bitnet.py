"""Ternary layers of BitNet b1.58 (Ma et al. 2024, arXiv:2402.17764): ``quant_method`` bitnet.

* Packed: a layer is ``.weight`` uint8 [out / 4, in], of whose row r bits 2 i and 2 i + 1 are row ``i * out / 4 + r``,
  the code plus one; and ``.weight_scale``, one number, by which codes are divided or, of class autobitlinear,
  multiplied.
* Mode online: ``.weight`` are plain numbers, to be rounded to -1, 0 and 1 times the mean of their sizes.

Source: transformers' integrations/bitnet.py. Inputs are rounded to 8 bits there, which the setting ``activations`` says
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llmjax.checkpoint.formats.layout import Layout, StoredRows
from llmjax.checkpoint.formats.quantized import Module, QuantizedTensor, QuantSettings
from llmjax.kernels.row_format import Codes

PACKED, SCALE = ".weight", ".weight_scale"
IN_A_BYTE = 4
LEAST = np.float32(1e-5)  # lower limit of the mean magnitude


@dataclass(frozen=True, eq=False)
class PackedPlanes:
    """Codes of two bits (`Planes`).

    Attributes:
        packed: uint8 [out / 4, in].
        scale: scale of all codes.
        outputs: number of rows.
    """

    packed: np.ndarray
    scale: np.float32
    outputs: int

    row_step = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.packed.shape[1]

    @property
    def layout(self) -> Layout:
        return Layout(size_in=self.shape[1], codes=Codes(2), group_size=self.shape[1], scale="f32", zero=1)

    def rows(self, start: int, stop: int) -> StoredRows:
        which, row = np.divmod(np.arange(start, stop), len(self.packed))
        codes = self.packed[row] >> (2 * which).astype(np.uint8)[:, None] & 3
        return StoredRows(codes=codes, scales=np.full((stop - start, 1), self.scale, np.float32))


@dataclass(frozen=True, eq=False)
class RoundedPlanes:
    """Plain numbers that become codes when they are read (`Planes`)."""

    weight: np.ndarray

    row_step = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @cached_property
    def scale(self) -> np.float32:
        """The mean of all magnitudes."""
        total = sum(float(np.abs(row.astype(np.float32)).sum(dtype=np.float64)) for row in self.weight)
        return max(np.float32(total / self.weight.size), LEAST)

    @property
    def layout(self) -> Layout:
        return Layout(size_in=self.shape[1], codes=Codes(2), group_size=self.shape[1], scale="f32", zero=1)

    def rows(self, start: int, stop: int) -> StoredRows:
        values = np.clip(np.rint(self.weight[start:stop].astype(np.float32) * (1 / self.scale)), -1, 1)
        scales = np.full((stop - start, 1), self.scale, np.float32)
        return StoredRows(codes=(values + 1).astype(np.uint8), scales=scales)


@dataclass(frozen=True)
class BitNet:
    """The settings that say how to read the tensors.

    Attributes:
        multiplied: whether codes are multiplied by the scale; else they are divided by it.
        online: whether weights are plain numbers.
    """

    multiplied: bool
    online: bool

    name = "BitNet"
    parts = (PACKED, SCALE)
    plain_part = PACKED

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> BitNet:
        if settings.flag("use_rms_norm", False):
            settings.fail("is true, but norms inside of layers are not supported", "use_rms_norm")
        own = settings.choice("linear_class", ("bitlinear", "autobitlinear"), "bitlinear") == "autobitlinear"
        online = settings.choice("quantization_mode", ("offline", "online"), "offline") == "online"
        return cls(multiplied=own, online=own and online)

    def is_quantized(self, module: Module) -> bool:
        weight = module.parts.get(PACKED)
        if weight is None or len(weight.shape) != 2:
            return False
        if self.online:
            return module.name.endswith("_proj")
        return weight.type_name == "U8"

    def open(self, module: Module) -> QuantizedTensor:
        if self.online:
            weight = module.array(PACKED, "F32", "F16", "BF16", dims=2)
            return module.quantized("BITNET-2", RoundedPlanes(weight))
        packed, scales = module.array(PACKED, "U8", dims=2), module.scales(SCALE)
        if scales.size != 1:
            module.fail(f"has {scales.size} numbers, not one", SCALE)
        scale = np.float32(scales.reshape(-1)[0])
        if not self.multiplied:
            if scale == 0:
                module.fail("is 0, by which codes would be divided", SCALE)
            scale = np.float32(1) / scale
        return module.quantized("BITNET-2", PackedPlanes(packed, scale, IN_A_BYTE * len(packed)))
