"""Models as pure functions of a flat dict of arrays, keyed by Hugging Face tensor names."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.models.config import ModelConfig
from llmjax.models.decoder import CausalLM
from llmjax.models.graph import ModelGraph
from llmjax.models.layers.norm import RMS
from llmjax.models.modules.parameter import axes_of, is_plain, parameters_of, state_of


@lru_cache(maxsize=8)
def definition(graph: ModelGraph) -> nnx.GraphDef:
    """The NNX graph definition of a model's modules."""
    return nnx.split(CausalLM(graph.config, dtype=graph.dtype, activation_dtype=graph.activation_dtype))[0]


def abstract_model(
    config: ModelConfig, *, dtype: jnp.dtype, activation_dtype: jnp.dtype
) -> tuple[ModelGraph, dict[str, jax.ShapeDtypeStruct]]:
    """Declares a model; nothing is allocated.

    Args:
        dtype: dtype of weight matrices; norms and biases are f32.
        activation_dtype: dtype of everything between layers.

    Returns:
        The graph that ``merge`` needs, and shape and dtype of each parameter by its Hugging Face name.
    """
    dtype, activation_dtype = jnp.dtype(dtype), jnp.dtype(activation_dtype)
    model = CausalLM(config, dtype=dtype, activation_dtype=activation_dtype)
    parameters = parameters_of(model)
    graph = ModelGraph(
        config=config,
        dtype=dtype,
        activation_dtype=activation_dtype,
        names=tuple(parameters),
        axes=tuple(axes_of(parameter) for parameter in parameters.values()),
        plain=frozenset(name for name, parameter in parameters.items() if is_plain(parameter)),
    )
    return graph, {name: parameter.get_value() for name, parameter in parameters.items()}


def merge(graph: ModelGraph, params: Mapping[str, Any]) -> CausalLM:
    """The model with its weights; to be called while tracing.

    Args:
        params: one value for each name that ``abstract_model`` gave: an array, or what ``llmjax.kernels.linear`` takes.

    Raises:
        ValueError: a name is missing or unknown.
    """
    return nnx.merge(definition(graph), state_of(params, names=graph.names, axes=graph.axes))


def init_random(config: ModelConfig, key: jax.Array, *, dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Random weights that keep activations near one, for tests and benchmarks.

    Args:
        key: a JAX random key; equal keys give equal weights.
        dtype: dtype of weight matrices.
    """
    _, shapes = abstract_model(config, dtype=dtype, activation_dtype=dtype)

    plus_one = isinstance(config.norm, RMS) and config.norm.plus_one

    def draw(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        # Folding the name in makes a tensor independent of which others exist.
        noise = jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), like.shape)
        if name.endswith("norm.weight"):
            value = (0.0 if plus_one else 1.0) + 0.1 * noise
        elif len(like.shape) > 1:
            value = noise * like.shape[-1] ** -0.5
        else:
            value = 0.1 * noise
        return value.astype(like.dtype)

    return {name: draw(name, like) for name, like in shapes.items()}
