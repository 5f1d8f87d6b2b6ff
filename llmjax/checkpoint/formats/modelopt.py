"""Checkpoints of NVIDIA's ModelOpt: FP8 or NVFP4, declared in config.json or hf_quant_config.json.

FP8 is ``.weight`` E4M3 with ``.weight_scale``, one number (or one a row); NVFP4 is ``.weight`` uint8 with
``.weight_scale`` E4M3 for groups and ``.weight_scale_2``, one number. Source: vLLM's quantization/modelopt.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmjax.checkpoint.formats.fp4 import NVFP4_GROUP, open_nvfp4
from llmjax.checkpoint.formats.quantized import Module, QuantizedTensor, QuantSettings
from llmjax.checkpoint.formats.scaled import open_scaled

ALGORITHMS = ("fp8", "fp8_per_channel_per_token", "nvfp4", "w4a16_nvfp4")
TYPE = {True: "U8", False: "F8_E4M3"}  # of the weight, by whether it is NVFP4


@dataclass(frozen=True)
class ModelOpt:
    """The settings that say how to read the tensors.

    Attributes:
        four_bit: NVFP4 rather than FP8.
    """

    four_bit: bool

    name = "ModelOpt"
    plain_part = ".weight"
    parts = (".weight", ".weight_scale", ".weight_scale_2", ".input_scale")

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> ModelOpt:
        settings = settings.child("quantization") or settings
        four_bit = "nvfp4" in settings.choice("quant_algo", ALGORITHMS)
        if four_bit:
            settings.integer("group_size", choices=(NVFP4_GROUP,), default=NVFP4_GROUP)
        return cls(four_bit)

    def is_quantized(self, module: Module) -> bool:
        weight = module.parts.get(".weight")
        return weight is not None and weight.type_name == TYPE[self.four_bit]

    def open(self, module: Module) -> QuantizedTensor:
        if self.four_bit:
            planes = open_nvfp4(
                module, packed=".weight", scales=".weight_scale", tensor_scale=".weight_scale_2", reciprocal=False
            )
            return module.quantized("ModelOpt-NVFP4", planes)
        return module.quantized("ModelOpt-FP8", open_scaled(module, ".weight_scale", types=(TYPE[False],)))


def looks_like(settings: Mapping[str, Any]) -> bool:
    """Whether settings without quant_method are ModelOpt's."""
    inner = settings.get("quantization")
    return "quant_algo" in settings or (isinstance(inner, dict) and "quant_algo" in inner)
