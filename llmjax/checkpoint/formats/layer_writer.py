"""What a way of writing quantized layers as safetensors has to say: the inverse of `quantized.LayerReader`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from llmjax.errors import ConfigError
from llmjax.weights.rows import QuantizedRows
from llmjax.weights.uniform import Float8Scheme, IntegerScheme

SavedScheme = IntegerScheme | Float8Scheme
I32 = np.dtype("<i4")


@dataclass(frozen=True, eq=False)
class Part:
    """One of the tensors that a layer is stored in.

    Attributes:
        shape, dtype: of the tensor.
        make: its values, from all rows of the layer.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[QuantizedRows], np.ndarray]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class LayerWriter(Protocol):
    """A way of storing linear layers in several tensors each."""

    @property
    def name(self) -> str:
        """Its ``quant_method``."""

    def kept(self, scheme: SavedScheme, dtype: np.dtype) -> SavedScheme:
        """The scheme with scales of the type that the format has.

        Args:
            dtype: float32, float16 or bfloat16, in which engines run the model.

        Raises:
            ConfigError: the format cannot hold the scheme.
        """

    def parts(self, scheme: SavedScheme, shape: tuple[int, int]) -> Mapping[str, Part]:
        """The tensors of a layer, by what follows the module's name.

        Args:
            scheme: as `kept` gave it.
            shape: (out, in).

        Raises:
            ConfigError: the shape does not suit the scheme; does not name the layer.
        """

    def settings(self, layers: Mapping[str, SavedScheme], ignored: Sequence[str]) -> dict[str, Any]:
        """``quantization_config`` of config.json.

        Args:
            layers: schemes of the quantized modules by name.
            ignored: names of the linear modules that are not quantized.

        Raises:
            ConfigError: the format cannot say so.
        """


def unsigned(codes: np.ndarray) -> np.ndarray:
    """Codes or zero points of a record as uint8: two's complement of 8 bits has 128 added."""
    return codes if codes.dtype == np.uint8 else codes.view(np.uint8) ^ np.uint8(128)


def check_groups(scheme: IntegerScheme, inputs: int) -> None:
    """Refuses groups that do not fill rows.

    Raises:
        ConfigError: names sizes that do.
    """
    if scheme.group_size and inputs % scheme.group_size:
        fitting = [str(size) for size in (256, 128, 96, 64, 48, 32, 16) if inputs % size == 0]
        hint = f"; --group-size {' or '.join(fitting)} would do" if fitting else ""
        raise ConfigError(f"{inputs} columns are not a multiple of {scheme.name}'s groups of {scheme.group_size}{hint}")
