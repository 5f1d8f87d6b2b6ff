"""Grouped-query attention over paged keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.attention import KVPages, RaggedBatch
from llmjax.kernels.blocks import AttentionRules, AttentionWeights, attention_block, attention_heads
from llmjax.kernels.rope import Rotation
from llmjax.models.config import LayerConfig, ModelConfig
from llmjax.models.layers.linear import Linear
from llmjax.models.layers.norm import RMSNorm


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
        self.rules = AttentionRules(
            scale=config.attention_scale,
            interleaved=config.ropes[layer.rope].interleaved,
            window=layer.window,
            softcap=config.attention_softcap,
        )

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
        return attention_block(x, self.weights(before=before, after=after), by, pages, batch, rules=self.rules)

    def heads(
        self, x: jax.Array, by: Rotation, pages: KVPages, batch: RaggedBatch, *, before: RMSNorm
    ) -> tuple[jax.Array, KVPages]:
        """What ``o_proj`` is given, [T, heads * head_dim], and the pages."""
        return attention_heads(x, self.weights(before=before, after=None), by, pages, batch, rules=self.rules)

    def weights(self, *, before: RMSNorm, after: RMSNorm | None) -> AttentionWeights:
        """As kernels take them."""
        return AttentionWeights(
            before=before.norm,
            q=self.q_proj.projection,
            k=self.k_proj.projection,
            v=self.v_proj.projection,
            q_norm=None if self.q_norm is None else self.q_norm.norm,
            k_norm=None if self.k_norm is None else self.k_norm.norm,
            o=self.o_proj.projection,
            after=None if after is None else after.norm,
        )
