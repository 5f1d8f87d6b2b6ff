"""The modules of `PerLayer`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models.layers.per_layer import PerLayer
from llmjax.models.modules.embedding import Embedding
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import build_norm


class PerLayerModule(nnx.Module):
    """``(norm(projection(x) / sqrt(D)) + sqrt(P) embedding(token)) / sqrt(2)``, for each layer.

    Formula: Hugging Face's ``Gemma4TextModel.project_per_layer_inputs``; tokens without an embedding use that of token
    0, as in its ``Gemma3nModel``.
    """

    def __init__(
        self, spec: PerLayer, size: int, *, layers: int, dtype: jnp.dtype, activation_dtype: jnp.dtype
    ) -> None:
        self.spec, self.size = spec, size
        self.embed_tokens = Embedding(
            spec.vocab_size, layers * spec.size, scale=spec.size**0.5, dtype=dtype, activation_dtype=activation_dtype
        )
        self.projection = Linear(size, layers * spec.size, bias=False, dtype=dtype)
        self.norm = build_norm(spec.norm, spec.size)

    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """i32 [T] and their embeddings [T, D] to [T, layers, P]."""
        projected = (self.projection(x) * self.size**-0.5).reshape(len(x), -1, self.spec.size)
        known_tokens = jnp.where(tokens < self.spec.vocab_size, tokens, 0)
        return (self.norm(projected) + self.embed_tokens(known_tokens).reshape(projected.shape)) * 2**-0.5


class PerLayerGate(nnx.Module):
    """``x + norm(out(activation(gate(x)) * vector))``."""

    def __init__(self, spec: PerLayer, size: int, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        self.gate = Linear(size, spec.size, bias=False, dtype=dtype)
        self.projection = Linear(spec.size, size, bias=False, dtype=dtype)
        self.norm = build_norm(spec.norm, size)

    def __call__(self, x: jax.Array, vector: jax.Array) -> jax.Array:
        """[T, D] and the layer's vectors [T, P] to [T, D]."""
        return x + self.added(x, vector)

    def added(self, x: jax.Array, vector: jax.Array) -> jax.Array:
        """The part that `__call__` adds to x."""
        gate = ACTIVATIONS[self.spec.activation](self.gate(x).astype(jnp.float32)).astype(x.dtype)
        return self.norm(self.projection(gate * vector))
