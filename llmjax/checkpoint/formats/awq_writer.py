"""Writes layers as AutoAWQ has them, see `awq`: 4 bits with zero points, version GEMM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmjax.checkpoint.formats.awq import COLUMN_OF_NIBBLE
from llmjax.checkpoint.formats.layer_format import I32, Part, SavedScheme, check_groups
from llmjax.errors import ConfigError
from llmjax.weights.rows import QuantizedRows
from llmjax.weights.uniform import IntegerScheme


@dataclass(frozen=True)
class AWQFormat:
    """A `LayerFormat`."""

    name: str = "awq"

    def kept(self, scheme: SavedScheme, dtype: np.dtype) -> SavedScheme:
        """See `LayerFormat`."""
        if not isinstance(scheme, IntegerScheme) or scheme.bits != 4 or scheme.symmetric:
            raise ConfigError(f"--format awq cannot hold {scheme.name}: it has 4 bits and zero points (int4_asym)")
        return replace(scheme, scale="f16")

    def parts(self, scheme: SavedScheme, shape: tuple[int, int]) -> Mapping[str, Part]:
        """See `LayerFormat`."""
        assert isinstance(scheme, IntegerScheme)
        outputs, inputs = shape
        check_groups(scheme, inputs)
        if outputs % 8:
            raise ConfigError(f"{outputs} rows do not fill the words of --format awq")
        groups = scheme.format(inputs).num_groups

        def zeros(rows: QuantizedRows) -> np.ndarray:
            assert rows.zeros is not None
            return pack_words(rows.zeros)

        return {
            ".qweight": Part((inputs, outputs // 8), I32, lambda rows: pack_words(rows.codes)),
            ".qzeros": Part((groups, outputs // 8), I32, zeros),
            ".scales": Part((groups, outputs), np.dtype(np.float16), lambda rows: rows.scales.T),
        }

    def settings(self, layers: Mapping[str, SavedScheme], ignored: Sequence[str]) -> dict[str, Any]:
        """See `LayerFormat`."""
        sizes = {scheme.group_size for scheme in layers.values() if isinstance(scheme, IntegerScheme)}
        if len(sizes) > 1:
            raise ConfigError(f"--format awq has one group size for all layers, not {sorted(sizes)}")
        return {
            "quant_method": self.name,
            "version": "gemm",
            "bits": 4,
            "group_size": sizes.pop() or -1,
            "zero_point": True,
            "modules_to_not_convert": list(ignored) or None,
        }


def pack_words(codes: np.ndarray) -> np.ndarray:
    """The inverse of `awq.unpack_words`, transposed: int32 [in, out / 8] from uint8 [out, in]."""
    rows = codes.reshape(-1, 8, codes.shape[1])
    words = np.zeros((len(rows), codes.shape[1]), np.uint32)
    for nibble, column in enumerate(COLUMN_OF_NIBBLE):
        words |= rows[:, column].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(I32).T
