"""SmoothQuant W8A8 checkpoints of AutoSmoothQuant, with quant_config.json.

A layer is ``.weight`` int8 [out, in] and ``.dequant_scale``, one number. Where activations are rounded per token, it
is the weight's scale. Where they are rounded with a fixed scale, it is the product with that scale, by which either
the norm before has been divided already, or (``.quant_scale`` is there) the layer's input has to be. So weights that
give the same result with activations left unrounded are code * dequant_scale / quant_scale.
Source: AutoSmoothQuant's autosmoothquant/layers/nn/linear.py. Type fp8 is a float8 weight with ``.weight_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmjax.checkpoint.formats.quant_settings import QuantSettings
from llmjax.checkpoint.formats.quantized import Module, QuantizedTensor
from llmjax.checkpoint.formats.scaled import FLOAT8, ScaledPlanes, open_scaled

SCALE, INPUT_SCALE = ".dequant_scale", ".quant_scale"
PLACES = (("qkv", "qkv_proj"), ("out", "o_proj"), ("fc1", "gate_up_proj"), ("fc2", "down_proj"))
"""Settings, each with the synonym that newer files use."""

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
    parts = (".weight", SCALE, INPUT_SCALE, ".weight_scale", ".input_scale")

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
        if needs_input_scale != (INPUT_SCALE in module.parts):
            names = " or ".join(PLACES[place]) if place is not None else "being after a norm"
            module.fail(f"is {'missing' if needs_input_scale else 'not expected'}, says {names}", INPUT_SCALE)
        planes = open_scaled(module, SCALE, types=("I8",))
        if needs_input_scale:
            input_scale = module.scales(INPUT_SCALE)
            if input_scale.size != 1 or not input_scale.item():
                module.fail("is no single number other than 0", INPUT_SCALE)
            with np.errstate(over="ignore"):
                scales = planes.scales.astype(np.float32) / np.float32(input_scale.item())
            module.check_finite(INPUT_SCALE, scales)
            planes = ScaledPlanes(planes.weight, scales, planes.block_rows, planes.block_columns)
        return module.quantized("SmoothQuant-8", planes)


def looks_like(settings: Mapping[str, Any]) -> bool:
    """Whether settings without quant_method are AutoSmoothQuant's."""
    return all(any(name in settings for name in names) for names in PLACES)
