"""Learned queries that layers change by attention to the patches of a frame or tile, and to each other.

Formula: Flamingo's perceiver resampler (arXiv:2204.14198, appendix A.1.1), as Idefics2 has it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models.layers.mlp import GatedMLP
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.mlp import gated_mlp_module
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.parameter import parameter
from llmjax.models.modules.residual import normed
from llmjax.models.vision.spec import Perceiving


class PerceiverLayer(nnx.Module):
    """``x + attention(norm(x))``, where keys and values are of patches too, then ``x + mlp(norm(x))``."""

    def __init__(self, spec: Perceiving, size: int, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        self.norm1, self.norm_kv, self.norm2 = (build_norm(spec.norm, size) for _ in range(3))
        of_q, of_kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = Linear(size, of_q, bias=False, dtype=dtype)
        self.k_proj = Linear(size, of_kv, bias=False, dtype=dtype)
        self.v_proj = Linear(size, of_kv, bias=False, dtype=dtype)
        self.o_proj = Linear(of_q, size, bias=False, dtype=dtype)
        self.mlp = gated_mlp_module(GatedMLP(inner=spec.inner, activation=spec.activation), size, dtype=dtype)

    def __call__(self, x: jax.Array, patches: jax.Array, segments: jax.Array) -> jax.Array:
        """Queries of all segments [S, Q, D] to the same shape; ``patches``: [P, D], ``segments``: i32 [P]."""
        spec, count = self.spec, len(x)
        n, seen = self.norm1(x.reshape(-1, x.shape[-1])), self.norm_kv(patches)
        q = self.q_proj(n).reshape(count, spec.queries, spec.kv_heads, -1, spec.head_dim)
        of_patches, own = (
            tuple(each(rows).reshape(len(rows), spec.kv_heads, spec.head_dim) for each in (self.k_proj, self.v_proj))
            for rows in (seen, n)
        )
        own_k, own_v = (each.reshape(count, spec.queries, *each.shape[1:]) for each in own)

        def attended(each: tuple[jax.Array, ...]) -> jax.Array:
            number, q, own_k, own_v = each
            k, v = (jnp.concatenate(both) for both in zip(of_patches, (own_k, own_v), strict=True))
            known = jnp.concatenate([segments == number, jnp.ones(spec.queries, bool)])
            scores = jnp.einsum("qkgh,pkh->kgqp", q, k, preferred_element_type=jnp.float32) * spec.head_dim**-0.5
            shares = jax.nn.softmax(scores, axis=-1, where=known).astype(v.dtype)
            return jnp.einsum("kgqp,pkh->qkgh", shares, v, preferred_element_type=jnp.float32).astype(x.dtype)

        numbers = jnp.arange(count, dtype=jnp.int32)
        out = jax.lax.map(attended, (numbers, q, own_k, own_v)).reshape(count * spec.queries, -1)
        x = x.reshape(-1, x.shape[-1]) + self.o_proj(out)
        return (x + self.mlp(self.norm2(x))).reshape(count, spec.queries, -1)


class Perceiver(nnx.Module):
    """A row for each learned query and each segment.

    Args:
        size: values of a patch's vector.
        out: values of a feature row.
    """

    def __init__(self, spec: Perceiving, size: int, out: int, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        self.gate_proj = Linear(size, spec.widened, bias=False, dtype=dtype)
        self.up_proj = Linear(size, spec.widened, bias=False, dtype=dtype)
        self.down_proj = Linear(spec.widened, out, bias=False, dtype=dtype)
        self.query = parameter((spec.queries, out), jnp.float32, axes=(None, None), plain=True)
        self.layers = nnx.List([PerceiverLayer(spec, out, dtype=dtype) for _ in range(spec.depth)])
        self.norm = build_norm(spec.norm, out)

    def __call__(self, x: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        """[P, W] to [S * queries, D], the rows of segments 0, 1, ... S - 1, where S is P // ``least``.

        Args:
            segments: i32 [P]; -1: padding. Rows of segments that have no patches are anything.
            positions: i32 [P, 2], row and column, of which nothing depends on them here.
        """
        count = len(x) // self.spec.least
        gate = ACTIVATIONS[self.spec.widened_activation](self.gate_proj(x).astype(jnp.float32)).astype(x.dtype)
        patches = self.down_proj(gate * self.up_proj(x))
        rows = jnp.broadcast_to(self.query.get_value().astype(x.dtype), (count, *self.query.get_value().shape))
        for layer in self.layers:
            rows = layer(rows, patches, segments)
        return normed(rows.reshape(-1, rows.shape[-1]), self.norm)
