"""Makes one row of each window of patches by attention (Molmo 2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.models.modules.linear import Linear
from llmjax.models.vision.spec import Windowing

MASKED = -1e30  # finite, so that a row without patches yields zeros and not NaN


class WindowPooling(nnx.Module):
    """``attention(mean(window), window)``; formula: Hugging Face's ``Molmo2Adapter``.

    Args:
        size: number of values of a patch.
        dtype: dtype of weight matrices; biases are f32.
    """

    def __init__(self, spec: Windowing, size: int, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        inner, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = Linear(size, inner, bias=spec.bias, dtype=dtype)
        self.k_proj = Linear(size, kv, bias=spec.bias, dtype=dtype)
        self.v_proj = Linear(size, kv, bias=spec.bias, dtype=dtype)
        self.o_proj = Linear(inner, spec.size, bias=spec.bias, dtype=dtype)

    def __call__(self, x: jax.Array, sources: jax.Array, shares: jax.Array) -> jax.Array:
        """[P, W] to [N, D].

        Args:
            sources: i32 [N, J], the patches of each window.
            shares: f32 [N, J], one divided by their number; 0 where there is none. Rows without any are anything.
        """
        spec, at, count = self.spec, jnp.maximum(sources, 0), len(sources)
        mean = jnp.einsum("njw,nj->nw", x[at].astype(jnp.float32), shares).astype(x.dtype)
        q = self.q_proj(mean).reshape(count, spec.kv_heads, -1, spec.head_dim).astype(jnp.float32)
        k, v = (
            each.reshape(len(x), spec.kv_heads, spec.head_dim)[at].astype(jnp.float32)
            for each in (self.k_proj(x), self.v_proj(x))
        )
        logits = jnp.einsum("nkgh,njkh->nkgj", q, k) * spec.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(shares[:, None, None] > 0, logits, MASKED), axis=-1)
        return self.o_proj(jnp.einsum("nkgj,njkh->nkgh", weights, v).reshape(count, -1).astype(x.dtype))
