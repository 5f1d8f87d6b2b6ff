"""FP8 checkpoints with ``quant_method`` fp8 (DeepSeek, Qwen and others) or fbgemm_fp8.

A layer is ``.weight`` float8 [out, in] and a scale to multiply with: ``.weight_scale_inv`` for blocks, typically of
128 x 128, or ``.weight_scale`` for the tensor or its rows. Sources: transformers' integrations/finegrained_fp8.py,
vLLM's quantization/fp8.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmjax.checkpoint.formats.quant_settings import QuantSettings
from llmjax.checkpoint.formats.quantized import Module, QuantizedTensor
from llmjax.checkpoint.formats.scaled import FLOAT8, open_scaled

SCALES = (".weight_scale_inv", ".weight_scale")


@dataclass(frozen=True)
class FP8:
    """The settings that say how to read the tensors.

    Attributes:
        block: outputs and inputs that share a scale; None: a scale for the tensor or for rows.
    """

    block: tuple[int, int] | None

    name = "FP8"
    parts = (".weight", *SCALES, ".input_scale", ".activation_scale", ".input_scale_ub")
    plain_part = ".weight"

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> FP8:
        settings.choice("fmt", ("e4m3", "float8_e4m3fn", "e5m2"), "e4m3")
        settings.choice("activation_scheme", ("dynamic", "static"), "dynamic")
        block = settings.value("weight_block_size")
        if block is None:
            return cls(None)
        if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
            settings.fail(f"is {str(block)[:60]}, not two sizes", "weight_block_size")
        return cls((block[0], block[1]))

    def is_quantized(self, module: Module) -> bool:
        weight = module.parts.get(".weight")
        return weight is not None and weight.type_name in FLOAT8

    def open(self, module: Module) -> QuantizedTensor:
        found = [part for part in SCALES if part in module.parts]
        if len(found) != 1:
            module.fail("is of FP8 and must have one of weight_scale_inv and weight_scale", ".weight")
        planes = open_scaled(module, found[0], types=FLOAT8, block=self.block)
        return module.quantized(f"FP8-{module.parts['.weight'].type_name}", planes)
