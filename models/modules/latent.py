"""The module of `LatentAttention`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.absorbed import into_latent, out_of_latent
from llmjax.kernels.attention import KVPages, attend
from llmjax.kernels.attention.chosen import attend_chosen
from llmjax.kernels.registry import Implementation, Operation
from llmjax.kernels.rope import rotate
from llmjax.models.layers.context import Context
from llmjax.models.layers.latent import LatentAttention
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.residual import mixed


class LatentAttentionModule(nnx.Module):
    """``o(attention(q, [latent, rotated key], latent))`` with absorbed projections of keys and values.

    A key is ``W_k latent``, so ``q · key`` is ``(W_kᵀ q) · latent``: queries are projected into the latent space, all
    heads attend to one key there, and their output is projected to values.
    """

    # Positional arguments: x, module, before, after, context; static argument: residual.
    sublayer: ClassVar[Operation] = Operation("latent attention sublayer", (Implementation("in steps", mixed),))
    divided: ClassVar[str] = "heads"  # the columns of ``o_proj``

    def __init__(self, spec: LatentAttention, size: int, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        q_size = spec.heads * (spec.nope_dim + spec.rope_dim)
        if spec.q_rank is None:
            self.q_proj = Linear(size, q_size, bias=False, dtype=dtype, axes=("heads", "hidden"))
        else:
            self.q_a_proj = Linear(size, spec.q_rank, bias=spec.bias, dtype=dtype)
            self.q_a_layernorm = build_norm(spec.norm, spec.q_rank)
            self.q_b_proj = Linear(spec.q_rank, q_size, bias=False, dtype=dtype, axes=("heads", None))
        self.kv_a_proj_with_mqa = Linear(size, spec.kv_rank + spec.rope_dim, bias=spec.bias, dtype=dtype)
        self.kv_a_layernorm = build_norm(spec.norm, spec.kv_rank)
        kv_size = spec.heads * (spec.nope_dim + spec.value_dim)
        # Its two halves are absorbed, so it is not used as one matrix.
        self.kv_b_proj = Linear(spec.kv_rank, kv_size, bias=False, dtype=dtype, axes=("heads", None), plain=True)
        values = spec.heads * spec.value_dim
        self.o_proj = Linear(values, size, bias=spec.bias, dtype=dtype, axes=("hidden", "heads"))

    def __call__(self, n: jax.Array, context: Context) -> tuple[jax.Array, KVPages]:
        """[T, D] to [T, D], and the pages with the tokens' latent vectors stored."""
        values, pages = self.values(n, context)
        return self.o_proj(values, context.batch.used), pages

    def partial(self, n: jax.Array, context: Context) -> tuple[jax.Array, KVPages]:
        """`__call__` without the bias of ``o_proj``."""
        values, pages = self.values(n, context)
        return self.o_proj.product(values, context.batch.used), pages

    def partial_to(self, n: jax.Array, context: Context, chosen: jax.Array) -> tuple[jax.Array, KVPages]:
        """`partial`, with attention to the keys at the positions ``chosen``, i32 [T, count]."""
        values, pages = self.values(n, context, partial(attend_chosen, chosen=chosen))
        return self.o_proj.product(values, context.batch.used), pages

    def values(
        self, n: jax.Array, context: Context, attend: Callable[..., tuple[jax.Array, KVPages]] = attend
    ) -> tuple[jax.Array, KVPages]:
        """The input of ``o_proj``, [T, H * value_dim], and the pages."""
        spec, used = self.spec, context.batch.used
        up = self.kv_b_proj.weight.get_value()
        queries = self._queries(n, used).reshape(len(n), -1, spec.nope_dim + spec.rope_dim)
        latent = self.kv_a_proj_with_mqa(n, used)
        key = jnp.expand_dims(latent[:, spec.kv_rank :], 1)  # [T, 1, rope_dim]
        latent = jnp.expand_dims(self.kv_a_layernorm(latent[:, : spec.kv_rank]), 1)  # [T, 1, kv_rank]
        turned = queries[..., spec.nope_dim :]
        if spec.rope is not None and context.rotation is not None:
            interleaved = spec.rope.interleaved
            turned, key = (rotate(x, context.rotation, interleaved=interleaved) for x in (turned, key))
        met = into_latent(queries[..., : spec.nope_dim], up)
        found, pages = attend(
            jnp.concatenate((met, turned), -1),
            jnp.concatenate((latent, key), -1),
            None,
            context.state,
            context.batch,
            scale=spec.scale,
        )
        return out_of_latent(found, up, size=spec.value_dim).reshape(len(n), -1), pages

    def _queries(self, n: jax.Array, used: jax.Array) -> jax.Array:
        if self.spec.q_rank is None:
            return self.q_proj(n, used)
        return self.q_b_proj(self.latent_queries(n, used), used)

    def latent_queries(self, n: jax.Array, used: jax.Array | None = None) -> jax.Array:
        """[T, D] to normed latent queries [T, q_rank]; for ``used`` see ``llmjax.kernels.linear.linear``."""
        latent: jax.Array = self.q_a_layernorm(self.q_a_proj(n, used))
        return latent

    @property
    def last_bias(self) -> jax.Array | None:
        """The bias that `partial` leaves out, [D]."""
        return self.o_proj.projection.bias
