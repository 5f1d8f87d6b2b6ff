"""Grouped-query attention over paged keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from kernels.attention import KVPages, RaggedBatch, attend
from kernels.fused import linear_add, norm_linears
from models.config import LayerConfig, ModelConfig
from models.layers.linear import Linear
from models.layers.norm import RMSNorm
from models.layers.rope import Rotation, rotate


class Attention(nnx.Module):
    """``x + after(o(attention))``; q, k and v are projected from ``before(x)``, normed if configured, and rotated."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype: jnp.dtype) -> None:
        size, head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        self.q_proj = Linear(size, heads * head_dim, bias=config.qkv_bias, dtype=dtype)
        self.k_proj = Linear(size, kv_heads * head_dim, bias=config.qkv_bias, dtype=dtype)
        self.v_proj = Linear(size, kv_heads * head_dim, bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Linear(heads * head_dim, size, bias=config.o_bias, dtype=dtype)
        norm = RMSNorm(head_dim, eps=config.norm_eps, plus_one=config.norm_plus_one) if config.qk_norm else None
        self.q_norm = norm
        self.k_norm = nnx.clone(norm) if norm is not None else None
        self.head_dim = head_dim
        self.interleaved = config.ropes[layer.rope].interleaved
        self.scale = config.attention_scale
        self.window = layer.window
        self.softcap = config.attention_softcap

    def __call__(
        self,
        x: jax.Array,
        by: Rotation,
        pages: KVPages,
        batch: RaggedBatch,
        *,
        before: RMSNorm,
        after: RMSNorm | None,
    ) -> tuple[jax.Array, KVPages]:
        """[T, D] to [T, D], and the layer's pages with the tokens' keys and values stored."""
        out, pages = self.heads(x, by, pages, batch, before=before)
        return linear_add(out, self.o_proj.projection, after.norm if after is not None else None, x), pages

    def heads(
        self, x: jax.Array, by: Rotation, pages: KVPages, batch: RaggedBatch, *, before: RMSNorm
    ) -> tuple[jax.Array, KVPages]:
        """What ``o_proj`` is given, [T, heads * head_dim], and the pages."""
        projections = [module.projection for module in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (y.reshape(len(x), -1, self.head_dim) for y in norm_linears(x, before.norm, projections))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(heads, by, interleaved=self.interleaved) for heads in (q, k))
        out, pages = attend(q, k, v, pages, batch, scale=self.scale, window=self.window, softcap=self.softcap)
        return out.reshape(len(x), -1), pages
