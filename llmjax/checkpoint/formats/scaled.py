"""Weights of one byte each, int8 or float8, times scales for the tensor, its rows, groups of columns or blocks.

Two formats have nothing else:

* ``quant_method`` fp8 (DeepSeek, Qwen and others) and fbgemm_fp8. A layer is ``.weight`` float8 [out, in] and a scale
  to multiply with: ``.weight_scale_inv`` for blocks, typically of 128 x 128, or ``.weight_scale`` for the tensor or its
  rows. Sources: transformers' integrations/finegrained_fp8.py, vLLM's quantization/fp8.py.
* SmoothQuant W8A8 of AutoSmoothQuant, with quant_config.json. A layer is ``.weight`` int8 [out, in] and
  ``.dequant_scale``, one number. Where activations are rounded per token, it is the weight's scale. Where they are
  rounded with a fixed scale, it is the product with that scale, by which either the norm before has been divided
  already, or (``.quant_scale`` is there) the layer's input has to be. So weights that give the same result with
  activations left unrounded are code * dequant_scale / quant_scale. Type fp8 is a float8 weight with ``.weight_scale``.
  Source: AutoSmoothQuant's autosmoothquant/layers/nn/linear.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from llmjax.checkpoint.formats.layout import Layout, StoredRows, scale_type
from llmjax.checkpoint.formats.quantized import Module, QuantizedTensor, QuantSettings
from llmjax.checkpoint.safetensors import DTYPES
from llmjax.kernels.row_format import Codes

FLOAT8 = ("F8_E4M3", "F8_E5M2")
ONE_BYTE = frozenset({"I8", *FLOAT8})
CODES: Mapping[np.dtype, Codes] = MappingProxyType(
    {
        DTYPES["I8"]: Codes(8, "int"),
        DTYPES["F8_E4M3"]: Codes(8, "e4m3"),
        DTYPES["F8_E5M2"]: Codes(8, "e5m2"),
    }
)
"""Kinds of codes by the weight's dtype."""


@dataclass(frozen=True, eq=False)
class ScaledPlanes:
    """weight[o, i] = (value[o, i] - zero) * scale, both of block (o // block_rows, i // block_columns).

    Attributes:
        weight: int8 or float8 [out, in].
        scales: floats [ceil(out / block_rows), ceil(in / block_columns)].
        zeros: int8 of the same shape, or None.
        block_rows, block_columns: outputs and inputs that share a scale.
    """

    weight: np.ndarray
    scales: np.ndarray
    block_rows: int
    block_columns: int
    zeros: np.ndarray | None = None

    row_step = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def layout(self) -> Layout:
        return Layout(
            size_in=self.shape[1],
            codes=CODES[self.weight.dtype],
            group_size=self.block_columns,
            scale=scale_type(self.scales.dtype),
            zero=0 if self.zeros is None else "i8",
        )

    def rows(self, start: int, stop: int) -> StoredRows:
        blocks = np.arange(start, stop) // self.block_rows
        return StoredRows(
            codes=self.weight[start:stop],
            scales=self.scales[blocks],
            zeros=None if self.zeros is None else self.zeros[blocks],
        )


def as_matrix(scales: np.ndarray) -> np.ndarray:
    """Scales for a tensor, [] or [1], as [1, 1], and those for rows, [out], as [out, 1]."""
    return scales if scales.ndim == 2 else scales.reshape(-1, 1)


def open_scaled(
    module: Module, scale_part: str, *, types: Collection[str], block: tuple[int, int] | None = None
) -> ScaledPlanes:
    """Planes of ``.weight`` and its scales.

    Args:
        module: the layer.
        scale_part: where the scales are; their shape says what they are for: [] and [1] for the tensor, [out] and
            [out, 1] for rows, [out, groups] for equal groups of columns, else one for each `block`.
        types: allowed types of the weight.
        block: rows and columns of a block.

    Raises:
        CheckpointError: a tensor is missing or malformed, or the scales have another shape.
    """
    weight = module.array(".weight", *types, dims=2)
    scales = module.scales(scale_part)
    outputs, inputs = weight.shape
    if block is not None:
        needed = (-(-outputs // block[0]), -(-inputs // block[1]))
        module.expect(scale_part, needed, f"{outputs} x {inputs} in blocks of {block[0]} x {block[1]}")
        return ScaledPlanes(weight, scales, *block)
    matrix = as_matrix(scales)
    if matrix.size == 1:
        return ScaledPlanes(weight, matrix, outputs, inputs)
    columns = matrix.shape[1]
    if scales.ndim > 2 or len(matrix) != outputs or inputs % columns:
        module.fail(
            f"has shape {list(scales.shape)}, which fits no scale per tensor, row or group of {outputs} x {inputs}",
            scale_part,
        )
    return ScaledPlanes(weight, matrix, 1, inputs // columns)


FP8_SCALES = (".weight_scale_inv", ".weight_scale")


@dataclass(frozen=True)
class FP8:
    """The settings that say how to read the tensors.

    Attributes:
        block: outputs and inputs that share a scale; None: a scale for the tensor or for rows.
    """

    block: tuple[int, int] | None

    name = "FP8"
    parts = (".weight", *FP8_SCALES, ".input_scale", ".activation_scale", ".input_scale_ub")
    plain_part = ".weight"

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> FP8:
        settings.choice("fmt", ("e4m3", "float8_e4m3fn", "e5m2"), "e4m3")
        settings.choice("activation_scheme", ("dynamic", "static"), "dynamic")
        return cls(None if settings.value("weight_block_size") is None else settings.sizes("weight_block_size"))

    def is_quantized(self, module: Module) -> bool:
        weight = module.parts.get(".weight")
        return weight is not None and weight.type_name in FLOAT8

    def open(self, module: Module) -> QuantizedTensor:
        found = [part for part in FP8_SCALES if part in module.parts]
        if len(found) != 1:
            module.fail("is of FP8 and must have one of weight_scale_inv and weight_scale", ".weight")
        planes = open_scaled(module, found[0], types=FLOAT8, block=self.block)
        return module.quantized(f"FP8-{module.parts['.weight'].type_name}", planes)


SMOOTH_SCALE, SMOOTH_INPUT_SCALE = ".dequant_scale", ".quant_scale"
PLACES = (("qkv", "qkv_proj"), ("out", "o_proj"), ("fc1", "gate_up_proj"), ("fc2", "down_proj"))
"""Keys of settings, each with the synonym in newer files."""

AFTER_NO_NORM = {"o_proj": 1, "out_proj": 1, "down_proj": 3, "fc2": 3}
"""Layers whose fixed input scale no norm can carry, and the place in PLACES of the setting that they obey."""


@dataclass(frozen=True)
class SmoothQuant:
    """The settings that say how to read the tensors.

    Attributes:
        float8: type fp8 rather than int8.
        fixed: for each of PLACES, whether activations have a fixed scale (``per-tensor``).
    """

    float8: bool
    fixed: tuple[bool, ...]

    name = "SmoothQuant"
    plain_part = ".weight"
    parts = (".weight", SMOOTH_SCALE, SMOOTH_INPUT_SCALE, ".weight_scale", ".input_scale")

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> SmoothQuant:
        float8 = settings.choice("type", ("int8", "fp8"), "int8") == "fp8"
        kinds = []
        for names in PLACES:
            key = next((name for name in names if settings.value(name) is not None), names[0])
            kinds.append(settings.choice(key, ("per-tensor", "per-token")) == "per-tensor")
        return cls(float8, tuple(kinds))

    def is_quantized(self, module: Module) -> bool:
        weight = module.parts.get(".weight")
        return weight is not None and weight.type_name in (FLOAT8 if self.float8 else ("I8",))

    def open(self, module: Module) -> QuantizedTensor:
        if self.float8:
            planes = open_scaled(module, ".weight_scale", types=FLOAT8)
            return module.quantized("SmoothQuant-F8", planes)
        place = AFTER_NO_NORM.get(module.name.rpartition(".")[2])
        needs_input_scale = place is not None and self.fixed[place]
        if needs_input_scale != (SMOOTH_INPUT_SCALE in module.parts):
            names = " or ".join(PLACES[place]) if place is not None else "being after a norm"
            module.fail(f"is {'missing' if needs_input_scale else 'not expected'}, says {names}", SMOOTH_INPUT_SCALE)
        planes = open_scaled(module, SMOOTH_SCALE, types=("I8",))
        if needs_input_scale:
            input_scale = module.scales(SMOOTH_INPUT_SCALE)
            if input_scale.size != 1 or not input_scale.item():
                module.fail("is not a single number other than 0", SMOOTH_INPUT_SCALE)
            with np.errstate(over="ignore"):
                scales = planes.scales.astype(np.float32) / np.float32(input_scale.item())
            module.check_finite(SMOOTH_INPUT_SCALE, scales)
            planes = ScaledPlanes(planes.weight, scales, planes.block_rows, planes.block_columns)
        return module.quantized("SmoothQuant-8", planes)


def looks_like_smoothquant(settings: Mapping[str, Any]) -> bool:
    """Whether settings without quant_method are AutoSmoothQuant's."""
    return all(any(name in settings for name in names) for names in PLACES)
