"""Writes layers as AutoGPTQ has them, see `gptq`: format ``gptq``, zero points stored less one, groups in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmjax.checkpoint.formats.layer_format import I32, Part, SavedScheme, unsigned
from llmjax.errors import ConfigError
from llmjax.quantization.mixes import NEVER
from llmjax.weights.bits import pack_bits
from llmjax.weights.rows import QuantizedRows
from llmjax.weights.uniform import IntegerScheme


@dataclass(frozen=True)
class GPTQFormat:
    """A `LayerFormat`."""

    name: str = "gptq"

    def kept(self, scheme: SavedScheme, dtype: np.dtype) -> SavedScheme:
        """See `LayerFormat`."""
        if not isinstance(scheme, IntegerScheme) or scheme.activations != "auto":
            raise ConfigError(f"--format gptq cannot hold {scheme.name}: use compressed-tensors")
        return replace(scheme, scale="f16")

    def parts(self, scheme: SavedScheme, shape: tuple[int, int]) -> Mapping[str, Part]:
        """See `LayerFormat`. The last group may be shorter."""
        assert isinstance(scheme, IntegerScheme)
        outputs, inputs, bits = *shape, scheme.bits
        if inputs * bits % 32 or outputs * bits % 32:
            raise ConfigError(f"a layer of {outputs} x {inputs} does not fill the words of --format gptq")
        groups, group_size = scheme.format(inputs).num_groups, scheme.group_size or inputs

        def zeros(rows: QuantizedRows) -> np.ndarray:
            stored = np.full((outputs, groups), 1 << bits - 1, np.uint8) if rows.zeros is None else unsigned(rows.zeros)
            less_one = (stored - np.uint8(1)) & np.uint8((1 << bits) - 1)
            return pack_bits(np.ascontiguousarray(less_one.T), bits)

        return {
            ".qweight": Part((inputs * bits // 32, outputs), I32, lambda rows: pack_bits(unsigned(rows.codes), bits).T),
            ".qzeros": Part((groups, outputs * bits // 32), I32, zeros),
            ".scales": Part((groups, outputs), np.dtype(np.float16), lambda rows: rows.scales.T),
            ".g_idx": Part((inputs,), I32, lambda rows: (np.arange(inputs) // group_size).astype(I32)),
        }

    def settings(self, layers: Mapping[str, SavedScheme], ignored: Sequence[str]) -> dict[str, Any]:
        """See `LayerFormat`."""
        scheme = _only(layers, self.name)
        # Whoever reads GPTQ knows that routers of experts are plain.
        if left := [name for name in ignored if name != "lm_head" and not NEVER.search(f"{name}.weight")]:
            raise ConfigError(f"--format gptq quantises every layer, {left[0]} too: use compressed-tensors")
        return {
            "quant_method": self.name,
            "checkpoint_format": "gptq",
            "bits": scheme.bits,
            "group_size": scheme.group_size or -1,
            "sym": scheme.symmetric,
            "desc_act": False,
            "static_groups": False,
            "true_sequential": True,
            "lm_head": "lm_head" in layers,
        }


def _only(layers: Mapping[str, SavedScheme], name: str) -> IntegerScheme:
    """The one scheme of all layers."""
    schemes = set(layers.values())
    if len(schemes) > 1:
        names = ", ".join(sorted(scheme.name for scheme in schemes))
        raise ConfigError(f"--format {name} has one scheme for all layers, not {names}: use compressed-tensors")
    scheme = schemes.pop()
    assert isinstance(scheme, IntegerScheme)
    return scheme
