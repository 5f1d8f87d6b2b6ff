"""Int8 checkpoints of Enflame's tools.

* ``quant_method`` w8a16, of TopsCompressor: a layer is ``.weight`` int8 [out, in] and ``.scales`` [1, out].
  weight = code * scale.
* candle-vllm-gcu's transform_safetensors.py repacks GPTQ and AWQ and leaves the settings as they are (its users may
  name w8a16). Symmetric 8 bits: ``.qweight`` int8 [out, in] and ``.scales`` [groups, out]; weight = code * scale. 4
  bits: ``.qweight`` uint8 [out, in / 2], of which each run of 64 bytes holds 128 inputs, the first half in the low
  nibbles, ``.scales`` and float ``.qzeros`` [groups, out], the zero points times the scales; inputs that do not fill
  the last run are padded. Older versions wrote ``.qweight`` transposed; all of a checkpoint is one or the other.
* ``quant_method`` w8a8: ``.weight`` int8 [out, in], ``.out_scales`` [out] and ``.in_scales``, one number or [in]. An
  input is divided by ``in_scales`` and rounded, a product multiplied with ``out_scales``. So weights that give the same
  result with inputs left as they are, are code * out_scale / in_scale.

Sources: EnflameTechnology/candle-vllm-gcu's transform_safetensors.py, EnflameTechnology/vllm-gcu's
kernels/quantization/w8a8.py and w8a16.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmjax.checkpoint.formats.layout import Layout, StoredRows, Unsigned, scale_type
from llmjax.checkpoint.formats.quantized import Module, QuantizedTensor, QuantSettings
from llmjax.checkpoint.formats.scaled import ScaledPlanes, open_scaled
from llmjax.checkpoint.safetensors import SafetensorsTensor

logger = logging.getLogger(__name__)

CODES, REPACKED = ".weight", ".qweight"
SCALES, ZEROS, OUT_SCALES, IN_SCALES = ".scales", ".qzeros", ".out_scales", ".in_scales"
RUN = 64  # bytes whose low nibbles come before their high ones
NIBBLES = Unsigned(4)


@dataclass(frozen=True)
class W8A16:
    """The settings hold nothing that the tensors do not say."""

    name = "W8A16"
    plain_part = ".weight"
    parts = (CODES, SCALES)

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
        return weight is not None and weight.type_name == "I8"

    def open(self, module: Module) -> QuantizedTensor:
        weight, scales = module.array(CODES, "I8", dims=2), module.scales(SCALES)
        if scales.size != len(weight):
            module.fail(f"has {scales.size} numbers for {len(weight)} outputs", SCALES)
        return module.quantized("W8A16-8", ScaledPlanes(weight, scales.reshape(-1, 1), 1, weight.shape[1]))


@dataclass(frozen=True, eq=False)
class NibblePlanes:
    """Attributes: as above, all with outputs first; `zeros` uint8 [out, groups], no longer multiplied."""

    bytes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    size_in: int

    row_step = 1

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.bytes), self.size_in

    @property
    def layout(self) -> Layout:
        return Layout(
            size_in=self.size_in,
            codes=NIBBLES.codes,
            group_size=self.size_in // self.scales.shape[1],
            scale=scale_type(self.scales.dtype),
            zero=NIBBLES.zero_type,
        )

    def rows(self, start: int, stop: int) -> StoredRows:
        runs = self.bytes[start:stop].reshape(stop - start, -1, RUN)
        codes = np.concatenate([runs & 15, runs >> 4], axis=2).reshape(stop - start, -1)
        return StoredRows(codes[:, : self.size_in], self.scales[start:stop], self.zeros[start:stop])


@dataclass(frozen=True)
class Repacked:
    """The reader of files that transform_safetensors.py has written.

    Attributes:
        bits: 4 or 8.
        group_size: inputs that share a scale, of 4 bits; -1: all.
        outputs_first: whether ``.qweight`` is [out, in]; None: no matrix says so.
    """

    bits: int
    group_size: int
    outputs_first: bool | None

    name = "Enflame"
    plain_part = ".weight"
    parts = (REPACKED, SCALES, ZEROS)

    @classmethod
    def from_settings(cls, settings: QuantSettings, stored: Mapping[str, SafetensorsTensor]) -> Repacked:
        bits = settings.integer("bits", "w_bit", choices=(4, 8), default=8)
        if bits == 8 and not settings.flag("sym", True):
            settings.fail("is false, but zero points have been left out", "sym")
        if bits == 8 and settings.flag("desc_act", False):
            settings.fail("is true, but the order of columns (g_idx) has been left out", "desc_act")
        group_size = settings.group_size("group_size", "q_group_size") if bits == 4 else -1
        return cls(bits, group_size, outputs_first(stored))

    def is_quantized(self, module: Module) -> bool:
        return REPACKED in module.parts

    def open(self, module: Module) -> QuantizedTensor:
        codes = module.array(REPACKED, "I8" if self.bits == 8 else "U8", dims=2)
        scales = module.scales(SCALES, dims=2)
        if self.outputs_first is None:
            module.fail("is square, as all are: nothing says whether its rows are outputs or inputs", REPACKED)
        codes = codes if self.outputs_first else codes.T
        outputs, width = codes.shape
        groups = len(scales)
        whole = width * 8 // self.bits
        inputs = whole if self.group_size < 0 else groups * self.group_size
        if scales.shape[1] != outputs or inputs % groups:
            module.fail(f"has shape {list(scales.shape)}, which fits no groups of {inputs} x {outputs}", SCALES)
        if self.bits == 8:
            return module.quantized("W8A16-8", ScaledPlanes(codes, scales.T, 1, inputs // groups))
        if whole % (2 * RUN) or not inputs <= whole < inputs + 2 * RUN:
            module.fail(f"has {whole} codes a row, which do not fit {groups} groups of {self.group_size}", REPACKED)
        planes = NibblePlanes(np.ascontiguousarray(codes), scales.T, self._zeros(module, scales).T, inputs)
        return module.quantized("Enflame-4", planes)

    def _zeros(self, module: Module, scales: np.ndarray) -> np.ndarray:
        """uint8 [groups, out]: what the scales have been multiplied with."""
        products = module.scales(ZEROS, dims=2)
        module.expect(ZEROS, scales.shape, "zero points like the scales")
        factors = np.where(scales == 0, 1, scales).astype(np.float32)
        zeros = np.round(products.astype(np.float32) / factors)
        if not ((zeros >= 0) & (zeros <= 15)).all() or not np.allclose(zeros * factors, products, rtol=2e-3, atol=0):
            module.fail("are not zero points from 0 to 15, times the scales", ZEROS)
        return zeros.astype(np.uint8)


def is_repacked(stored: Mapping[str, SafetensorsTensor]) -> bool:
    """Whether transform_safetensors.py has been at work: GPTQ and AWQ have words of 32 bits."""
    return any(name.endswith(REPACKED) and tensor.type_name in ("I8", "U8") for name, tensor in stored.items())


def outputs_first(stored: Mapping[str, SafetensorsTensor]) -> bool | None:
    """Whether rows of the matrices are outputs, as those say whose sides differ; None: none does."""
    said = set()
    for name, tensor in stored.items():
        scales = stored.get(name.removesuffix(REPACKED) + SCALES)
        if name.endswith(REPACKED) and scales is not None and len(tensor.shape) == len(scales.shape) == 2:
            rows, columns = tensor.shape
            if rows != columns and scales.shape[1] in (rows, columns):
                said.add(scales.shape[1] == rows)
    return said.pop() if len(said) == 1 else None


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
