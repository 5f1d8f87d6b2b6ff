"""The module of `Attention`: one call of a fused kernel, or step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.attention import KVPages, attend
from llmjax.kernels.blocks import AttentionRules, AttentionWeights
from llmjax.kernels.cpu import blocks as cpu
from llmjax.kernels.norm import rms_norm
from llmjax.kernels.registry import Implementation, Operands, Operation
from llmjax.kernels.rope import Rotation, rotate
from llmjax.kernels.sharding import all_sum, own_part
from llmjax.models.layers.attention import Attention
from llmjax.models.layers.chunks import by_chunk
from llmjax.models.layers.context import Context
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import NormModule, RMSNorm, build_norm, kernel_norm, normed_together
from llmjax.models.modules.parameter import parameter
from llmjax.models.modules.residual import mixed, normed


def _operands(
    x: jax.Array,
    attention: AttentionModule,
    before: NormModule | None,
    after: NormModule | None,
    context: Context,
    **options: bool,
) -> Operands:
    by = context.rotation
    if by is None:
        by = Rotation(cos=jnp.zeros((len(x), 0)), sin=jnp.zeros((len(x), 0)))
    weights = attention.weights(before, after)
    return Operands(x, weights, by, context.state, context.batch, rules=attention.rules, **options)


# Positional arguments: x, module, before, after, context; static argument: residual.
ATTENTION_SUBLAYER = Operation(
    "attention sublayer", (cpu.ATTENTION_BLOCK.taking(_operands), Implementation("in steps", mixed))
)


class AttentionModule(nnx.Module):
    """``o(attention(q(n), k(n), v(n)))``, with rotated and maybe normed q and k."""

    sublayer: ClassVar[Operation] = ATTENTION_SUBLAYER
    divided: ClassVar[str] = "heads"  # the columns of ``o_proj``

    def __init__(self, spec: Attention, size: int, *, dtype: jnp.dtype) -> None:
        q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.spec = spec
        of_q, of_kv = ("heads", "hidden"), ("kv_heads", "hidden")
        parts_of_q = 2 if spec.gated else 1
        self.q_proj = Linear(size, parts_of_q * q_size, bias=spec.qkv_bias, dtype=dtype, axes=of_q)
        of_rows = size if spec.picture is None else spec.picture.size or size
        if not spec.reads_only:
            self.k_proj = Linear(of_rows, kv_size, bias=spec.qkv_bias, dtype=dtype, axes=of_kv)
            self.k_norm = _norm_of(spec, spec.kv_heads, "kv_heads")
            self.v_norm = None if spec.v_norm is None else build_norm(spec.v_norm, spec.head_dim)
            if not spec.values_of_keys:
                self.v_proj = Linear(of_rows, kv_size, bias=spec.qkv_bias, dtype=dtype, axes=of_kv)
        self.o_proj = Linear(q_size, size, bias=spec.o_bias, dtype=dtype, axes=("hidden", "heads"))
        self.sinks = parameter((spec.heads,), jnp.float32, axes=("heads",)) if spec.sinks else None
        self.q_norm = _norm_of(spec, spec.heads, "heads")
        self.o_norm = None if spec.o_norm is None else build_norm(spec.o_norm, q_size, axes=("heads",))

    def __call__(self, n: jax.Array, context: Context) -> tuple[jax.Array, KVPages]:
        """[T, D] to [T, D], and the pages with the tokens' keys and values stored."""
        heads, pages = self.heads(n, context)
        return self.o_proj(heads, context.batch.used), pages

    def partial(self, n: jax.Array, context: Context) -> tuple[jax.Array, KVPages]:
        """`__call__` without the bias of ``o_proj``."""
        heads, pages = self.heads(n, context)
        return self.o_proj.product(heads, context.batch.used), pages

    def heads(self, n: jax.Array, context: Context) -> tuple[jax.Array, KVPages]:
        """The input of ``o_proj``, [T, H * h], and the pages."""
        spec, used = self.spec, context.batch.used
        q, gate = self.queries(n, used)
        q, batch = self.clipped(q), context.batch
        if spec.picture is not None and spec.picture.size is not None:
            q, k, v = self.looked_up(q, context)
        elif spec.reads_only:  # zeros are stored, in the dummy page
            q = self.placed(q, self.q_norm, context)
            k = v = jnp.zeros((len(n), spec.kv_heads, spec.head_dim), q.dtype)
            batch = replace(batch, kv_index=jnp.zeros_like(batch.kv_index))
        else:
            k = self.k_proj(n, used).reshape(len(n), -1, spec.head_dim)
            v = k if spec.values_of_keys else self.v_proj(n, used).reshape(k.shape)
            k, v = self.clipped(k), normed(self.clipped(v), self.v_norm)
            of_q, of_k = self.mean_squares(q, k)
            q, k = self.placed(q, self.q_norm, context, of_q), self.placed(k, self.k_norm, context, of_k)
        if spec.sharpened is not None:
            q = q * spec.sharpened.factors(batch)[:, None, None].astype(q.dtype)
        if spec.picture is not None:
            batch = spec.picture.seen(batch)
        if spec.chunk is not None:
            batch = by_chunk(batch, spec.chunk, page_size=context.state.page_size)
        out, pages = attend(
            q,
            k,
            v,
            context.state,
            batch,
            scale=spec.scale,
            window=spec.window,
            causal=spec.causal,
            softcap=spec.softcap,
            sinks=None if self.sinks is None else self.sinks.get_value(),
            slopes=None if spec.slopes is None else own_part(jnp.asarray(spec.slopes, jnp.float32), "heads"),
        )
        out = out.reshape(len(n), -1)
        out = out if gate is None else out * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(out.dtype)
        if self.o_norm is None or spec.divided is None:
            return normed(out, self.o_norm), pages
        assert isinstance(self.o_norm, RMSNorm)
        return normed_together(out, self.o_norm, spec.divided.heads * spec.head_dim, self.divided), pages

    def looked_up(self, q: jax.Array, context: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The queries, and keys and values [T, H, h] of the rows that tokens stand for; of others any."""
        spec, rows, used = self.spec, context.looked_up, context.batch.used
        if rows is None:  # the picture is in an earlier step
            zeros = jnp.zeros((len(q), spec.kv_heads, spec.head_dim), q.dtype)
            return q, zeros, zeros
        rows = rows.astype(q.dtype)
        k, v = (each(rows, used).reshape(len(q), -1, spec.head_dim) for each in (self.k_proj, self.v_proj))
        return q, k, v

    def clipped(self, x: jax.Array) -> jax.Array:
        """Queries, keys or values with clipped entries."""
        return x if self.spec.clip is None else jnp.clip(x, -self.spec.clip, self.spec.clip)

    def mean_squares(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        """Mean squares of queries and keys [T, H, h] over all devices, f32 [T, 1], in one sum; None: not needed."""
        spec, whole = self.spec, self.spec.divided
        if whole is None or spec.qk_norm is None or spec.qk_norm_over != "all heads":
            return None, None
        counted = own_part(jnp.asarray(whole.counted, jnp.float32), self.divided)
        of_q, of_k = (jnp.square(x.astype(jnp.float32)).sum(axis=-1) for x in (q, k))
        sums = all_sum(jnp.stack([of_q.sum(axis=-1), (of_k * counted).sum(axis=-1)], axis=-1), self.divided)
        return sums[:, :1] / (whole.heads * spec.head_dim), sums[:, 1:] / (whole.kv_heads * spec.head_dim)

    def placed(
        self, x: jax.Array, norm: NormModule | None, context: Context, mean_square: jax.Array | None = None
    ) -> jax.Array:
        """Queries or keys [T, H, h], normed and rotated.

        Args:
            mean_square: a result of `mean_squares`.
        """
        spec = self.spec
        if spec.qk_norm_first:
            x = _normed(x, norm, spec, mean_square)
        if spec.rope is not None and context.rotation is not None:
            x = rotate(x, context.rotation, interleaved=spec.rope.interleaved)
        return x if spec.qk_norm_first else _normed(x, norm, spec)

    def queries(self, n: jax.Array, used: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Queries [T, H, h] and gates of the heads, [T, H * h]; for ``used`` see ``llmjax.kernels.linear.linear``."""
        q = self.q_proj(n, used)
        if not self.spec.gated:
            return q.reshape(len(n), -1, self.spec.head_dim), None
        # The rows are one head's query and gate, then the next head's.
        q, gate = jnp.split(q.reshape(len(n), -1, 2 * self.spec.head_dim), 2, axis=-1)
        return q, gate.reshape(len(n), -1)

    def weights(self, before: NormModule | None, after: NormModule | None) -> AttentionWeights:
        """The weights in the form that kernels take."""
        return AttentionWeights(
            before=kernel_norm(before),
            q=self.q_proj.projection,
            k=self.k_proj.projection,
            v=self.v_proj.projection,
            q_norm=kernel_norm(self.q_norm),
            k_norm=kernel_norm(self.k_norm),
            o=self.o_proj.projection,
            after=kernel_norm(after),
        )

    @property
    def last_bias(self) -> jax.Array | None:
        """The bias that `partial` leaves out, [D]."""
        return self.o_proj.projection.bias

    @property
    def rules(self) -> AttentionRules:
        """The static settings in the form that kernels take."""
        spec = self.spec
        interleaved = spec.rope is not None and spec.rope.interleaved
        return AttentionRules(
            scale=spec.scale,
            interleaved=interleaved,
            window=spec.window,
            causal=spec.causal,
            softcap=spec.softcap,
        )


class SteppedAttentionModule(AttentionModule):
    """Attention that the fused kernels do not support: gates, sinks, clipped entries, ALiBi, other norms of q and k,
    values that are normed or are keys, chunks, norms after the heads, keys of another layer, and cross-attention."""

    sublayer: ClassVar[Operation] = Operation("attention sublayer", (Implementation("in steps", mixed),))


def attention_module(spec: Attention, size: int, *, dtype: jnp.dtype) -> AttentionModule:
    """The module for a hidden size of ``size``; ``dtype``: dtype of the matrices."""
    return (AttentionModule if spec.is_fused else SteppedAttentionModule)(spec, size, dtype=dtype)


def _norm_of(spec: Attention, heads: int, axis: str) -> NormModule | None:
    if spec.qk_norm is None:
        return None
    if spec.qk_norm_over == "each head":
        return build_norm(spec.qk_norm, heads, spec.head_dim, axes=(axis, None))
    if spec.qk_norm_over == "all heads":
        return build_norm(spec.qk_norm, heads * spec.head_dim, axes=(axis,))
    return build_norm(spec.qk_norm, spec.head_dim)


def _normed(x: jax.Array, norm: NormModule | None, spec: Attention, mean_square: jax.Array | None = None) -> jax.Array:
    """Applies the norm to heads [T, H, h], if there is one."""
    if norm is None or spec.qk_norm_over != "all heads":
        return x if norm is None else norm(x)
    flat = x.reshape(len(x), -1)
    if mean_square is None:
        return norm(flat).reshape(x.shape)
    assert isinstance(norm, RMSNorm)
    return rms_norm(flat, norm.norm, mean_square=mean_square).reshape(x.shape)
