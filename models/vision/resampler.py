"""Learned queries that attend to the patches of each frame or tile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.parameter import parameter
from llmjax.models.vision.spec import Resampling

THETA = 10000.0


class Resampler(nnx.Module):
    """A row for each learned query and each segment: attention, a norm, and a matrix.

    Keys, and they alone, have sines and cosines of their columns and rows added.

    Args:
        size: values of a patch's vector.
        out: values of a feature row, a multiple of four.
    """

    def __init__(self, spec: Resampling, size: int, out: int, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        self.query = parameter((spec.queries, out), jnp.float32, axes=(None, None), plain=True)
        self.kv_proj = None if size == out else Linear(size, out, bias=False, dtype=dtype)
        self.ln_q, self.ln_kv, self.ln_post = (build_norm(spec.norm, out) for _ in range(3))
        self.q_proj = Linear(out, out, bias=True, dtype=dtype)
        self.k_proj = Linear(out, out, bias=True, dtype=dtype)
        self.v_proj = Linear(out, out, bias=True, dtype=dtype)
        self.o_proj = Linear(out, out, bias=True, dtype=dtype)
        self.proj = Linear(out, out, bias=False, dtype=dtype)

    def __call__(self, x: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        """[P, W] to [S * queries, D], the rows of segments 0, 1, ... S - 1, where S is P // ``least``.

        Args:
            segments: i32 [P]; -1: padding. Rows of segments that have no patches are anything.
            positions: i32 [P, 2], row and column.
        """
        spec, heads = self.spec, self.spec.heads
        x = self.ln_kv(x if self.kv_proj is None else self.kv_proj(x))
        keys = self.k_proj(x + waves(positions, x.shape[-1]).astype(x.dtype)).reshape(len(x), heads, -1)
        values = self.v_proj(x).reshape(len(x), heads, -1)
        query = self.ln_q(self.query.get_value()).astype(x.dtype)
        queries = self.q_proj(query).reshape(spec.queries, heads, -1)
        scores = jnp.einsum("qhd,khd->hqk", queries, keys, preferred_element_type=jnp.float32)
        scores = scores * keys.shape[-1] ** -0.5

        def rows_of(segment: jax.Array) -> jax.Array:
            shares = jax.nn.softmax(scores, axis=-1, where=segments == segment).astype(x.dtype)
            return jnp.einsum("hqk,khd->qhd", shares, values, preferred_element_type=jnp.float32).astype(x.dtype)

        rows = jax.lax.map(rows_of, jnp.arange(len(x) // spec.least, dtype=jnp.int32))
        return self.proj(self.ln_post(self.o_proj(rows.reshape(-1, x.shape[-1]))))


def waves(positions: jax.Array, size: int) -> jax.Array:
    """Sines and cosines of columns, then of rows, f32 [P, size]; formula: section 3.5 of arXiv:1706.03762."""
    rates = THETA ** -(jnp.arange(size // 4, dtype=jnp.float32) / (size // 4))
    column, row = (positions[:, axis, None].astype(jnp.float32) * rates for axis in (1, 0))
    return jnp.concatenate([jnp.sin(column), jnp.cos(column), jnp.sin(row), jnp.cos(row)], axis=-1)
