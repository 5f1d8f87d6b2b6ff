"""What adapters change of an encoder of images: values that a run takes beside the weights, for all of its images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.adapters.adapter import LowRank
from llmjax.engine.adapters.layout import AdaptedParameter, AdapterLayout, Use
from llmjax.engine.adapters.stacks import AdaptedShape, Values

PATCHES = "patch_embed.weight"
ONLY = 1  # the place of every row: a run is of one adapter


@dataclass(frozen=True)
class EncoderAdapters:
    """The form of what an adapter changes of an encoder.

    Attributes:
        shapes: the parameters that adapters may change.
        rank: the largest rank; smaller adapters are filled up with zeros.
    """

    shapes: tuple[AdaptedShape, ...]
    rank: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], *, rank: int) -> EncoderAdapters:
        """The form for parameters of these shapes, by name."""
        found = (AdaptedShape(AdaptedParameter(name, Use.PRODUCT), shape, None) for name, shape in shapes.items())
        return cls(tuple(found), rank)

    @cached_property
    def layout(self) -> AdapterLayout:
        """The layout of the values; they are as the arrays of one place are."""
        return AdapterLayout(ONLY, self.rank, tuple(one.parameter for one in self.shapes))

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters that adapters may change, by name."""
        return {one.parameter.name: one.shape for one in self.shapes}

    @property
    def specs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and types of the values."""
        every = [array for one in self.shapes for array in one.values(self.rank)]
        special = jax.ShapeDtypeStruct((ONLY + 1,), jnp.int32)
        return (special, *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in every))

    def values_of(self, parts: Mapping[str, LowRank]) -> Values:
        """The values of an adapter.

        Args:
            parts: see `Adapter.of_encoder`; of ranks up to this one's.
        """
        is_special = any(part.gain is not None or part.bias is not None for part in parts.values())
        values: Values = [np.array([0, is_special], np.int32)]
        for one in self.shapes:
            values += one.parts(parts.get(one.parameter.name), self.rank)
        return values


def adaptable_of_encoder(
    shapes: Mapping[str, jax.ShapeDtypeStruct], plain: frozenset[str]
) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of an encoder that adapters may change, by name: those that it multiplies with.

    Args:
        shapes, plain: as ``abstract_encoder`` declares them.
    """
    matrices = {name for name, shape in shapes.items() if len(shape.shape) == 2 and name.endswith(".weight")}
    return {name: tuple(shapes[name].shape) for name in shapes if name in matrices - (plain - {PATCHES})}


def with_adapter(params: Mapping[str, Any], values: tuple[jax.Array, ...], layout: AdapterLayout) -> dict[str, Any]:
    """An encoder's parameters with an adapter, while a program is traced.

    Args:
        values: those of `EncoderAdapters.specs`.
    """
    return layout.applied(params, values, jnp.int32(ONLY))
