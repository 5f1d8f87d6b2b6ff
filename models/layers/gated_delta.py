"""Gated delta net (Yang et al. 2024, arXiv:2412.06464), as Qwen3-Next has it: a memory of fixed size instead of keys.

Each head's memory is a matrix that maps keys to values. A token lets it fade, corrects what it holds for the token's
key, and reads it with the token's query. No engine keeps such state yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.kernels.attention import RaggedBatch
from llmjax.models.layers.linear import Linear
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.parameter import parameter
from llmjax.models.layers.state import Recurrent, RecurrentState

L2_EPS = 1e-6  # of the norms of queries and keys


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """A gated delta net; ``value_heads / key_heads`` memories share a query and a key."""

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    width: int  # of the causal convolution over q, k and v: tokens, its own included
    activation: str  # behind the convolution, a key of ACTIVATIONS
    norm: RMS  # of each head's output

    name: ClassVar[str] = "linear_attn"
    rope: ClassVar[None] = None

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the last inputs of the convolution, and the memories."""
        return Recurrent(
            recent=(self.width - 1, self.channels), memory=(self.value_heads, self.key_dim, self.value_dim)
        )

    def build(self, size: int, *, dtype: jnp.dtype) -> GatedDeltaModule:
        """The module of a residual stream of ``size`` entries a token; ``dtype``: of the matrices."""
        return GatedDeltaModule(self, size, dtype=dtype)


class GatedDeltaModule(nnx.Module):
    """``out(norm(delta(conv(q), conv(k), conv(v))) * silu(z))``; formula: Hugging Face's ``Qwen3NextGatedDeltaNet``."""

    def __init__(self, spec: GatedDelta, size: int, *, dtype: jnp.dtype) -> None:
        values = spec.value_heads * spec.value_dim
        self.spec = spec
        self.in_proj_qkvz = Linear(size, spec.channels + values, bias=False, dtype=dtype)
        self.in_proj_ba = Linear(size, 2 * spec.value_heads, bias=False, dtype=dtype)
        self.conv1d = Convolution(spec.channels, spec.width)
        self.dt_bias = parameter((spec.value_heads,), jnp.float32, axes=(None,))
        self.A_log = parameter((spec.value_heads,), jnp.float32, axes=(None,))
        self.norm = spec.norm.build(spec.value_dim)
        self.out_proj = Linear(values, size, bias=False, dtype=dtype)

    def __call__(self, n: jax.Array, state: RecurrentState, batch: RaggedBatch) -> tuple[jax.Array, RecurrentState]:
        """[T, D] to [T, D], and the state after the step.

        Args:
            batch: ``page_table[:, 0]`` is the slot of each row's state, 0 of rows of padding.
        """
        spec, rows = self.spec, _Rows.of(batch, len(n))
        mixed, z, decay, rate = self._projected(n)
        recent = jnp.where(rows.fresh[:, None, None], 0, state.recent[rows.slot])
        mixed, recent = self.conv1d(mixed, recent, rows)
        mixed = ACTIVATIONS[spec.activation](mixed)
        q, k, v = jnp.split(mixed, (spec.key_heads * spec.key_dim, 2 * spec.key_heads * spec.key_dim), axis=-1)
        q, k = (_unit(x.reshape(len(n), spec.key_heads, spec.key_dim)) for x in (q, k))
        q, k = (jnp.repeat(x, spec.value_heads // spec.key_heads, axis=1) for x in (q * spec.key_dim**-0.5, k))
        memory = jnp.where(rows.fresh[:, None, None, None], 0, state.memory[rows.slot])
        out, memory = delta_rule(q, k, v.reshape(z.shape), decay, rate, memory, rows.of_token, batch.query_start[-1])
        out = self.norm(out.astype(n.dtype)).astype(jnp.float32) * jax.nn.silu(z)
        state = RecurrentState(
            recent=state.recent.at[rows.slot].set(recent), memory=state.memory.at[rows.slot].set(memory)
        )
        return self.out_proj(out.reshape(len(n), -1).astype(n.dtype)), state

    def _projected(self, n: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """In f32: what is convolved [T, channels], z [T, H, value_dim], and of each head log decay and rate [T, H]."""
        spec, tokens = self.spec, len(n)
        shared = spec.value_heads // spec.key_heads
        # Columns lie by key head: its q, k, and the v and z of the value heads that share it.
        by_head = self.in_proj_qkvz(n).astype(jnp.float32).reshape(tokens, spec.key_heads, -1)
        cuts = (spec.key_dim, 2 * spec.key_dim, 2 * spec.key_dim + shared * spec.value_dim)
        q, k, v, z = jnp.split(by_head, cuts, axis=-1)
        b, a = jnp.split(self.in_proj_ba(n).astype(jnp.float32).reshape(tokens, spec.key_heads, -1), 2, axis=-1)
        rate = jax.nn.sigmoid(b.reshape(tokens, -1))
        step = jax.nn.softplus(a.reshape(tokens, -1) + self.dt_bias.get_value())
        decay = -jnp.exp(self.A_log.get_value()) * step
        mixed = jnp.concatenate([x.reshape(tokens, -1) for x in (q, k, v)], axis=-1)
        return mixed, z.reshape(tokens, spec.value_heads, spec.value_dim), decay, rate


class Convolution(nnx.Module):
    """A causal convolution of each channel by itself."""

    def __init__(self, channels: int, width: int) -> None:
        self.weight = parameter((channels, 1, width), jnp.float32, axes=(None, None, None))

    def __call__(self, x: jax.Array, recent: jax.Array, rows: _Rows) -> tuple[jax.Array, jax.Array]:
        """f32 [T, channels] to the same, and the inputs that the next step's first tokens see.

        Args:
            recent: [R, width - 1, channels], what came before each row's tokens.
        """
        weight = self.weight.get_value()[:, 0]  # [channels, width]
        width = weight.shape[1]
        before = width - 1

        def at(row: jax.Array, place: jax.Array) -> jax.Array:
            """The input of a row at a place in this step, or before it where that is negative."""
            inside = x[jnp.clip(rows.start[row] + place, 0, len(x) - 1)]
            return jnp.where((place >= 0)[:, None], inside, recent[row, jnp.clip(before + place, 0, before - 1)])

        out = sum(at(rows.of_token, rows.place + shift - before) * weight[:, shift] for shift in range(width))
        every = jnp.arange(len(rows.slot))
        kept = jnp.stack([at(every, rows.count + shift - before) for shift in range(before)], axis=1)
        return jnp.asarray(out), kept


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    rate: jax.Array,
    memory: jax.Array,
    row: jax.Array,
    tokens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Fades, corrects and reads the memory of each token's row, one token after the other.

    Args:
        q, k, v: f32 [T, H, key size], the same, and [T, H, value size].
        decay: f32 [T, H], the logarithm of what is left of the memory.
        rate: f32 [T, H], how much of the error is corrected.
        memory: f32 [R, H, key size, value size].
        row: i32 [T], the row of each token; rows' tokens are in order.
        tokens: i32 [], how many there are; the rest is padding, whose output is zero.

    Returns:
        f32 [T, H, value size] and the memory afterwards.
    """

    def step(t: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, memory = carry
        held = memory[row[t]] * jnp.exp(decay[t])[:, None, None]
        error = v[t] - jnp.einsum("hkv,hk->hv", held, k[t], precision="highest")
        held = held + k[t][:, :, None] * (rate[t][:, None] * error)[:, None]
        read = jnp.einsum("hkv,hk->hv", held, q[t], precision="highest")
        return out.at[t].set(read), memory.at[row[t]].set(held)

    out, memory = jax.lax.fori_loop(0, tokens, step, (jnp.zeros_like(v), memory))
    return out, memory


@dataclass(frozen=True)
class _Rows:
    """Where tokens and rows meet."""

    start: jax.Array  # i32 [R], each row's first token
    count: jax.Array  # i32 [R], its tokens
    slot: jax.Array  # i32 [R], of its state
    fresh: jax.Array  # bool [R], whether nothing came before this step
    of_token: jax.Array  # i32 [T], row
    place: jax.Array  # i32 [T], in the row's tokens of this step

    @classmethod
    def of(cls, batch: RaggedBatch, tokens: int) -> _Rows:
        start, count = batch.query_start[:-1], jnp.diff(batch.query_start)
        every = jnp.arange(tokens)
        row = jnp.clip(jnp.searchsorted(batch.query_start, every, side="right") - 1, 0, len(start) - 1)
        return cls(
            start=start,
            count=count,
            slot=batch.page_table[:, 0],
            fresh=batch.kv_len == count,
            of_token=row,
            place=every - start[row],
        )


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + L2_EPS)
