"""Encoders as pure functions of a flat dict of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.models.modules.parameter import axes_of, is_plain, parameters_of, state_of
from llmjax.models.vision.batch import PatchBatch
from llmjax.models.vision.encoder import Encoded, VisionEncoder
from llmjax.models.vision.spec import VisionSpec


@dataclass(frozen=True)
class EncoderGraph:
    """An encoder without weights: static and hashable, so that a jitted function can close over it.

    Attributes:
        dtype: dtype of weight matrices.
        activation_dtype: dtype of everything between layers.
        names: names of the parameters.
        axes: logical names of each parameter's axes.
        plain: names of parameters that must be arrays, even if files store them quantized.
    """

    spec: VisionSpec
    dtype: jnp.dtype
    activation_dtype: jnp.dtype
    names: tuple[str, ...]
    axes: tuple[tuple[str | None, ...], ...]
    plain: frozenset[str] = frozenset()


@lru_cache(maxsize=8)
def _definition(graph: EncoderGraph) -> nnx.GraphDef:
    return nnx.split(VisionEncoder(graph.spec, dtype=graph.dtype, activation_dtype=graph.activation_dtype))[0]


def abstract_encoder(
    spec: VisionSpec, *, dtype: jnp.dtype, activation_dtype: jnp.dtype
) -> tuple[EncoderGraph, dict[str, jax.ShapeDtypeStruct]]:
    """Declares an encoder; nothing is allocated.

    Args:
        dtype: dtype of weight matrices; norms and biases are f32.
        activation_dtype: dtype of everything between layers.

    Returns:
        The graph that ``encode`` needs, and shape and dtype of each parameter by its name.
    """
    dtype, activation_dtype = jnp.dtype(dtype), jnp.dtype(activation_dtype)
    model = VisionEncoder(spec, dtype=dtype, activation_dtype=activation_dtype)
    parameters = parameters_of(model)
    graph = EncoderGraph(
        spec=spec,
        dtype=dtype,
        activation_dtype=activation_dtype,
        names=tuple(parameters),
        axes=tuple(axes_of(parameter) for parameter in parameters.values()),
        plain=frozenset(name for name, parameter in parameters.items() if is_plain(parameter)),
    )
    return graph, {name: parameter.get_value() for name, parameter in parameters.items()}


def encode(graph: EncoderGraph, params: Mapping[str, Any], batch: PatchBatch) -> Encoded:
    """The feature rows of a batch; to be called while tracing.

    Args:
        params: one value for each name that ``abstract_encoder`` gave.

    Raises:
        ValueError: a name is missing or unknown.
    """
    return encoder_of(graph, params)(batch)


def encoder_of(graph: EncoderGraph, params: Mapping[str, Any]) -> VisionEncoder:
    """The encoder with its weights; arguments and errors as those of `encode`."""
    state = state_of(params, names=graph.names, axes=graph.axes)
    encoder: VisionEncoder = nnx.merge(_definition(graph), state)
    return encoder
