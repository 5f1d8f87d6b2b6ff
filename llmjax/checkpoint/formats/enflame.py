"""Int8 checkpoints of Enflame's tools.

* ``quant_method`` w8a16, of TopsCompressor: a layer is ``.weight`` int8 [out, in] and ``.scales`` [1, out]; or, of
  candle-vllm-gcu's transform_safetensors.py, which repacks symmetric GPTQ of 8 bits: ``.qweight`` int8 [in, out] and
  ``.scales`` [groups, out]. weight = code * scale.
* ``quant_method`` w8a8: ``.weight`` int8 [out, in], ``.out_scales`` [out] and ``.in_scales``, one number or [in]. An
  input is divided by ``in_scales`` and rounded, a product multiplied with ``out_scales``. So weights that give the same
  result with inputs left as they are, are code * out_scale / in_scale.

Sources: EnflameTechnology/candle-vllm-gcu's transform_safetensors.py, EnflameTechnology/vllm-gcu's
kernels/quantization/w8a8.py and w8a16.py.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from llmjax.checkpoint.formats.quantized import Module, QuantizedTensor, QuantSettings
from llmjax.checkpoint.formats.scaled import ScaledPlanes, open_scaled

logger = logging.getLogger(__name__)

CODES, REPACKED = ".weight", ".qweight"
SCALES, OUT_SCALES, IN_SCALES = ".scales", ".out_scales", ".in_scales"


@dataclass(frozen=True)
class W8A16:
    """The settings hold nothing that the tensors do not say."""

    name = "W8A16"
    plain_part = ".weight"
    parts = (REPACKED, CODES, SCALES)

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> W8A16:
        if settings.value("bits") is not None:
            settings.integer("bits", choices=(8,))
        if not settings.flag("sym", True):
            settings.fail("is false, but zero points have been left out", "sym")
        if settings.flag("desc_act", False):
            settings.fail("is true, but the order of columns (g_idx) has been left out", "desc_act")
        return cls()

    def is_quantized(self, module: Module) -> bool:
        weight = module.parts.get(CODES)
        return REPACKED in module.parts or (weight is not None and weight.type_name == "I8")

    def open(self, module: Module) -> QuantizedTensor:
        if REPACKED not in module.parts:
            weight, scales = module.array(CODES, "I8", dims=2), module.scales(SCALES)
            if scales.size != len(weight):
                module.fail(f"has {scales.size} numbers for {len(weight)} outputs", SCALES)
            return module.quantized("W8A16-8", ScaledPlanes(weight, scales.reshape(-1, 1), 1, weight.shape[1]))
        codes, scales = module.array(REPACKED, "I8", dims=2), module.scales(SCALES, dims=2)
        inputs, outputs = codes.shape
        groups = len(scales)
        if scales.shape[1] != outputs or inputs % groups:
            module.fail(f"has shape {list(scales.shape)}, which fits no groups of {inputs} x {outputs}", SCALES)
        return module.quantized("W8A16-8", ScaledPlanes(codes.T, scales.T, 1, inputs // groups))


@dataclass(frozen=True, eq=False)
class ColumnScaledTensor(QuantizedTensor):
    """A matrix of which each column is divided by a number of its own, which no record holds.

    Attributes:
        divisors: f32 [in].
    """

    divisors: np.ndarray | None = None

    def row_source(self) -> None:
        """It has to be dequantized."""
        logger.warning("tensor %r of type %s is dequantized: columns have scales", self.name, self.type_name)

    def read(self, dtype: np.dtype) -> np.ndarray:
        """See `QuantizedTensor.read`."""
        assert self.divisors is not None
        return (super().read(np.dtype(np.float32)) / self.divisors).astype(dtype)


@dataclass(frozen=True)
class W8A8:
    """The settings hold nothing that the tensors do not say."""

    name = "W8A8"
    plain_part = ".weight"
    parts = (CODES, OUT_SCALES, IN_SCALES)

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> W8A8:
        return cls()

    def is_quantized(self, module: Module) -> bool:
        weight = module.parts.get(CODES)
        return weight is not None and weight.type_name == "I8"

    def open(self, module: Module) -> QuantizedTensor:
        planes = open_scaled(module, OUT_SCALES, types=("I8",))
        divisors = module.scales(IN_SCALES).astype(np.float32).reshape(-1)
        if divisors.size not in (1, planes.shape[1]) or not (divisors > 0).all():
            module.fail(f"are not one number above 0, nor {planes.shape[1]}", IN_SCALES)
        if (divisors == divisors[0]).all():
            scales = planes.scales.astype(np.float32) / divisors[0]
            module.check_finite(IN_SCALES, scales)
            return module.quantized(
                "W8A8-8", ScaledPlanes(planes.weight, scales, planes.block_rows, planes.block_columns)
            )
        plain = module.quantized("W8A8-8", planes)
        return ColumnScaledTensor(plain.name, plain.type_name, planes, plain.nbytes, divisors=divisors)
