"""The module of `Indexer`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.attention import KVPages
from llmjax.kernels.attention.chosen import best_keys
from llmjax.kernels.rope import rotate
from llmjax.models.layers.context import Context
from llmjax.models.layers.latent import Indexer
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import build_norm


class IndexerModule(nnx.Module):
    """Finds the keys with the largest ``sum over heads of weight * relu(query . key)``.

    Formula: Hugging Face's ``DeepseekV32Indexer``, which leaves out the rotation by a Hadamard matrix and the rounding
    to fp8 of DeepSeek's own kernels.
    """

    def __init__(self, spec: Indexer, size: int, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        self.wq_b = Linear(spec.q_rank, spec.heads * spec.size, bias=False, dtype=dtype)
        self.wk = Linear(size, spec.size, bias=False, dtype=dtype)
        self.k_norm = build_norm(spec.norm, spec.size)
        self.weights_proj = Linear(size, spec.heads, bias=False, dtype=jnp.dtype(jnp.float32), plain=True)

    def __call__(self, n: jax.Array, latent: jax.Array, context: Context) -> tuple[jax.Array, KVPages]:
        """Positions of the chosen keys, i32 [T, count], see `best_keys`; and the pages with the tokens' keys stored.

        Args:
            n: [T, D], the input of the mixer.
            latent: [T, q_rank], the mixer's normed latent queries.
        """
        spec, used = self.spec, context.batch.used
        q = self._rotated(self.wq_b(latent, used).reshape(len(n), -1, spec.size), context)
        k = self._rotated(jnp.expand_dims(self.k_norm(self.wk(n, used)), 1), context)[:, 0]
        weights = self.weights_proj(n.astype(jnp.float32), used) * spec.heads**-0.5
        scale = spec.size**-0.5
        return best_keys(q, weights, k, context.state, context.batch, scale=scale, count=spec.count)

    def _rotated(self, x: jax.Array, context: Context) -> jax.Array:
        """Rotates the first entries of [T, H, size]."""
        assert context.rotation is not None
        turned, rest = jnp.split(x, [self.spec.rope.rotary_dim], axis=-1)
        return jnp.concatenate((rotate(turned, context.rotation, interleaved=self.spec.rope.interleaved), rest), -1)
