"""Models as pure functions of a flat dict of arrays, keyed by Hugging Face tensor names."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import ModelConfig
from models.decoder import CausalLM


def abstract_model(
    config: ModelConfig, *, dtype: jnp.dtype, activation_dtype: jnp.dtype
) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """A model without weights.

    Args:
        dtype: of weight matrices; norms and biases are f32.
        activation_dtype: of everything between layers.

    Returns:
        The graph definition for ``merge``, and shape and dtype of each parameter by its Hugging Face name.
    """
    model = CausalLM(config, dtype=jnp.dtype(dtype), activation_dtype=jnp.dtype(activation_dtype))
    graphdef, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    return graphdef, {".".join(map(str, path)): parameter.get_value() for path, parameter in flat}


def merge(graphdef: Any, params: Mapping[str, Any]) -> CausalLM:
    """The model with its weights; to be called while tracing.

    Args:
        params: one value for each name that ``abstract_model`` gave: an array, or whatever ``kernels.linear`` takes.
    """
    flat = {tuple(int(part) if part.isdigit() else part for part in name.split(".")): v for name, v in params.items()}
    return nnx.merge(graphdef, nnx.from_flat_state({path: nnx.Param(value) for path, value in flat.items()}))


def init_random(config: ModelConfig, key: jax.Array, *, dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Random weights that keep activations near one, for tests and benchmarks.

    Args:
        key: a JAX random key; equal keys give equal weights.
        dtype: of weight matrices.
    """
    _, shapes = abstract_model(config, dtype=dtype, activation_dtype=dtype)

    def draw(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        # Folding the name in makes a tensor independent of which others exist.
        noise = jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), like.shape)
        if name.endswith("norm.weight"):
            value = (0.0 if config.norm_plus_one else 1.0) + 0.1 * noise
        elif len(like.shape) == 2:
            value = noise * like.shape[1] ** -0.5
        else:
            value = 0.1 * noise
        return value.astype(like.dtype)

    return {name: draw(name, like) for name, like in shapes.items()}
