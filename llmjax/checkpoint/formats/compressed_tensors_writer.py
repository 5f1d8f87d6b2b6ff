"""Writes layers as compressed-tensors has them, see `compressed_tensors`: what vLLM and transformers read.

Weight-only integers are pack-quantized, integers for rounded activations int-quantized, float8 float-quantized.
Source: the compressed-tensors package, quantization/quant_args.py, quant_scheme.py and quant_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from llmjax.checkpoint.formats.compressed_tensors import PACKED, PACKED_WEIGHT, SCALE, ZERO
from llmjax.checkpoint.formats.layer_format import I32, Part, SavedScheme, check_groups, scale_number, unsigned
from llmjax.errors import ConfigError
from llmjax.weights.bits import pack_bits
from llmjax.weights.rows import NUMBER_DTYPES, QuantizedRows
from llmjax.weights.uniform import Float8Scheme, IntegerScheme

VERSION = "0.20.0"  # of the package whose format this is
F32, I8, E4M3 = np.dtype(np.float32), np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)
DYNAMIC_TOKENS = {"strategy": "token", "dynamic": True, "symmetric": True, "group_size": None, "observer": None}


@dataclass(frozen=True)
class CompressedTensorsFormat:
    """A `LayerFormat`."""

    name: str = "compressed-tensors"

    def kept(self, scheme: SavedScheme, dtype: np.dtype) -> SavedScheme:
        """See `LayerFormat`. Engines load scales of packed weights in the model's dtype, others in float32."""
        if _form(scheme) == PACKED:
            assert isinstance(scheme, IntegerScheme)
            return replace(scheme, scale=scale_number(dtype))
        if isinstance(scheme, IntegerScheme) and (scheme.group_size or not scheme.symmetric):
            raise ConfigError(f"{scheme.name} has one scale for each row and no zero points: leave out the group size")
        return scheme

    def parts(self, scheme: SavedScheme, shape: tuple[int, int]) -> Mapping[str, Part]:
        """See `LayerFormat`."""
        if isinstance(scheme, Float8Scheme):
            scales = Part((1,), F32, _first_scale) if scheme.per_tensor else Part((shape[0], 1), F32, _scales)
            return {".weight": Part(shape, E4M3, _codes), SCALE: scales}
        if _form(scheme) != PACKED:
            return {".weight": Part(shape, I8, _codes), SCALE: Part((shape[0], 1), F32, _scales)}
        check_groups(scheme, shape[1])
        outputs, inputs, bits = *shape, scheme.bits
        form = scheme.format(inputs)
        parts = {
            PACKED_WEIGHT: Part((outputs, -(-inputs * bits // 32)), I32, partial(_packed, bits=bits)),
            SCALE: Part((outputs, form.num_groups), NUMBER_DTYPES[form.scale], _scales),
            ".weight_shape": Part((2,), np.dtype("<i8"), lambda rows: np.array(shape, "<i8")),
        }
        if not scheme.symmetric:
            zeros = (-(-outputs * bits // 32), form.num_groups)
            parts[ZERO] = Part(zeros, I32, partial(_packed_zeros, bits=bits))
        return parts

    def settings(self, layers: Mapping[str, SavedScheme], ignored: Sequence[str]) -> dict[str, Any]:
        """See `LayerFormat`. The scheme of most layers is that of every Linear; others are named one by one."""
        by_scheme: dict[SavedScheme, list[str]] = {}
        for module, scheme in layers.items():
            by_scheme.setdefault(scheme, []).append(module)
        most = max(by_scheme, key=lambda scheme: len(by_scheme[scheme]))
        groups = {
            f"group_{i}": _group(scheme, ["Linear"] if scheme is most else by_scheme[scheme])
            for i, scheme in enumerate(sorted(by_scheme, key=lambda scheme: scheme is not most))
        }
        forms = {_form(scheme) for scheme in by_scheme}
        return {
            "quant_method": self.name,
            "version": VERSION,
            "quantization_status": "compressed",
            "format": forms.pop() if len(forms) == 1 else "mixed-precision",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "config_groups": groups,
            "ignore": list(ignored),
        }


def _form(scheme: SavedScheme) -> str:
    if isinstance(scheme, Float8Scheme):
        return "float-quantized"
    return PACKED if scheme.activations == "auto" else "int-quantized"


def _group(scheme: SavedScheme, targets: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {"dynamic": False, "observer": "minmax", "actorder": None, "block_structure": None}
    activations: dict[str, Any] | None = None
    if isinstance(scheme, Float8Scheme):
        weights |= {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
        weights["strategy"] = "tensor" if scheme.per_tensor else "channel"
        activations = {"num_bits": 8, "type": "float", **DYNAMIC_TOKENS}
    else:
        weights |= {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric}
        weights |= {"strategy": "group" if scheme.group_size else "channel", "group_size": scheme.group_size or None}
        if _form(scheme) != PACKED:
            activations = {"num_bits": 8, "type": "int", **DYNAMIC_TOKENS}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": _form(scheme),
    }


def _codes(rows: QuantizedRows) -> np.ndarray:
    return rows.codes


def _scales(rows: QuantizedRows) -> np.ndarray:
    return rows.scales


def _first_scale(rows: QuantizedRows) -> np.ndarray:
    return rows.scales[0]


def _packed(rows: QuantizedRows, bits: int) -> np.ndarray:
    return pack_bits(unsigned(rows.codes), bits)


def _packed_zeros(rows: QuantizedRows, bits: int) -> np.ndarray:
    assert rows.zeros is not None
    return pack_bits(unsigned(rows.zeros).T, bits).T
