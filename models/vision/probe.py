"""A learned query that attends to the patches of each tile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.models.modules.linear import Linear
from llmjax.models.modules.mlp import MLPModule
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.parameter import parameter
from llmjax.models.vision.spec import Probing


class Probe(nnx.Module):
    """A row for each tile.

    Formula: the attention pooling of "Scaling Vision Transformers" (arXiv:2106.04560, section 3.2), as SigLIP has it.

    Args:
        size: values of a patch's vector, and of a row.
    """

    def __init__(self, spec: Probing, size: int, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        self.query = parameter((size,), jnp.float32, axes=(None,), plain=True)
        self.q_proj = Linear(size, size, bias=True, dtype=dtype)
        self.k_proj = Linear(size, size, bias=True, dtype=dtype)
        self.v_proj = Linear(size, size, bias=True, dtype=dtype)
        self.o_proj = Linear(size, size, bias=True, dtype=dtype)
        self.norm = build_norm(spec.norm, size)
        self.mlp = MLPModule(spec.feed_forward, size, dtype=dtype)

    def __call__(self, x: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        """[P, W] to [P / tile, W]; rows of tiles of padding are anything.

        Args:
            segments, positions: see `Resampler`; nothing depends on them here, since all tiles are whole.
        """
        heads, tile = self.spec.heads, self.spec.least
        query = self.q_proj(self.query.get_value().astype(x.dtype)[None]).reshape(heads, -1)
        keys, values = (each(x).reshape(-1, tile, heads, query.shape[-1]) for each in (self.k_proj, self.v_proj))
        scores = jnp.einsum("hd,tkhd->thk", query, keys, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(scores * query.shape[-1] ** -0.5, axis=-1).astype(x.dtype)
        seen = jnp.einsum("thk,tkhd->thd", shares, values, preferred_element_type=jnp.float32).astype(x.dtype)
        rows = self.o_proj(seen.reshape(len(seen), -1))
        return rows + self.mlp(self.norm(rows))
