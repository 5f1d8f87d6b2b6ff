"""Every way to quantise weights at load, by the name that users type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from llmjax.errors import ConfigError
from llmjax.kernels.qtensor import RowFormat
from llmjax.weights import uniform
from llmjax.weights.ggml import reference
from llmjax.weights.rows import QuantizedRows
from llmjax.weights.uniform import UniformScheme


@dataclass(frozen=True)
class BlockScheme:
    """A ggml type, bit for bit as ggml's reference quantiser makes it (a `UniformScheme`)."""

    name: str
    activations: str = "auto"

    def format(self, size_in: int) -> RowFormat:
        """See `UniformScheme`."""
        form = reference.SCHEMES[self.name].block.row_format(size_in)
        assert form is not None
        return form

    def quantize(self, rows: np.ndarray) -> QuantizedRows:
        """See `UniformScheme`."""
        raw = reference.quantize(rows, self.name, threads=1)
        return reference.SCHEMES[self.name].block.quantized_rows(raw, self.format(rows.shape[1]))


SCHEMES: Mapping[str, UniformScheme] = MappingProxyType(
    {**{name: BlockScheme(name) for name in reference.SCHEMES}, **uniform.SCHEMES}
)
"""By name; ggml's also go by their aliases, see `scheme_named`."""


def scheme_named(name: str) -> UniformScheme:
    """A scheme by name or alias, in any case.

    Raises:
        ConfigError: there is none.
    """
    key = name.lower()
    found = SCHEMES.get(key) or SCHEMES.get(reference.ALIASES.get(key.replace("_", ""), ""))
    if found is None:
        raise ConfigError(f"quantization scheme {name!r} is unknown; known are {', '.join(SCHEMES)}")
    return found
