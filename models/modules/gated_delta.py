"""The module of `GatedDelta`."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.kernels.norm import rms_norm
from llmjax.kernels.recurrent.gated_delta import gated_delta
from llmjax.kernels.registry import Implementation, Operation
from llmjax.models.layers.context import Context
from llmjax.models.layers.gated_delta import GatedDelta
from llmjax.models.layers.state import RecurrentState
from llmjax.models.modules.convolution import Convolution
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.parameter import parameter
from llmjax.models.modules.residual import mixed

L2_EPS = 1e-6  # added to the squared length of queries and keys


class GatedDeltaModule(nnx.Module):
    """``out(norm(read) * silu(z))``, where q, k and v pass through a convolution first.

    Formula: Hugging Face's ``Qwen3NextGatedDeltaNet``.
    """

    # Positional arguments: x, module, before, after, context; static argument: residual.
    sublayer: ClassVar[Operation] = Operation("gated delta sublayer", (Implementation("in steps", mixed),))
    divided: ClassVar[str] = "heads"  # the columns of ``out_proj``
    last_bias: ClassVar[None] = None

    def __init__(self, spec: GatedDelta, size: int, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        values, f32 = spec.value_heads * spec.value_dim, jnp.float32
        by_head = ("heads", "hidden")  # key heads, each with its value heads
        if spec.in_turn:
            self.in_proj_qkv = Linear(size, spec.channels, bias=False, dtype=dtype, axes=("channels", "hidden"))
            self.in_proj_z = Linear(size, values, bias=False, dtype=dtype, axes=by_head)
            self.in_proj_b = Linear(size, spec.value_heads, bias=False, dtype=dtype, axes=by_head)
            self.in_proj_a = Linear(size, spec.value_heads, bias=False, dtype=dtype, axes=by_head)
        else:  # the rows are one key head's query, key, values and gates, then the next one's
            self.in_proj_qkvz = Linear(size, spec.channels + values, bias=False, dtype=dtype, axes=by_head)
            self.in_proj_ba = Linear(size, 2 * spec.value_heads, bias=False, dtype=dtype, axes=by_head)
        self.conv1d = Convolution(spec.channels, spec.width)
        self.dt_bias = parameter((spec.value_heads,), f32, axes=("heads",))
        self.A_log = parameter((spec.value_heads,), f32, axes=("heads",))
        self.norm = build_norm(spec.norm, spec.value_dim)
        self.out_proj = Linear(values, size, bias=False, dtype=dtype, axes=("hidden", "heads"))

    def __call__(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        """[T, D] to [T, D], and the state after the tokens."""
        spec, batch, tokens = self.spec, context.batch, len(n)
        state: RecurrentState = context.state
        assert state.memory is not None
        shared = spec.value_heads // spec.key_heads
        x, z, b, a = self._projected(n, batch.used)
        heads = x.shape[-1] // (2 * spec.key_dim + shared * spec.value_dim)  # value heads of this device
        x, recent = self.conv1d(x, state, batch)
        keys = heads * spec.key_dim
        q, k, v = _split(ACTIVATIONS[spec.activation](x), (keys, keys, x.shape[-1] - 2 * keys))
        q, k = (of_length_one(part.reshape(tokens, heads, -1)) for part in (q, k))
        decay = -jnp.exp(self.A_log.get_value()) * jax.nn.softplus(a.reshape(tokens, -1) + self.dt_bias.get_value())
        read, memory = gated_delta(
            q * spec.key_dim**-0.5,
            k,
            v.reshape(tokens, -1, spec.value_dim),
            decay,
            jax.nn.sigmoid(b.reshape(tokens, -1)),
            state.memory,
            batch,
            page_size=state.page_size,
        )
        read = rms_norm(read.astype(n.dtype), self.norm.norm).astype(jnp.float32)
        read = read * jax.nn.silu(z.reshape(read.shape).astype(jnp.float32))
        out = self.out_proj(read.astype(n.dtype).reshape(tokens, -1), batch.used)
        return out, RecurrentState(recent, memory, state.page_size)

    def _projected(self, n: jax.Array, used: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The convolution's input, f32 [T, channels], gates [T, heads x value size], and for each value head the
        strength of the write and the decay, f32 [T, heads], before their activations."""
        spec, tokens, f32 = self.spec, len(n), jnp.float32
        if spec.in_turn:
            b, a = self.in_proj_b(n, used).astype(f32), self.in_proj_a(n, used).astype(f32)
            return self.in_proj_qkv(n, used).astype(f32), self.in_proj_z(n, used), b, a
        shared = spec.value_heads // spec.key_heads
        sizes = (spec.key_dim, spec.key_dim, shared * spec.value_dim, shared * spec.value_dim)
        q, k, v, z = _split(self.in_proj_qkvz(n, used).reshape(tokens, -1, sum(sizes)), sizes)
        b, a = _split(self.in_proj_ba(n, used).reshape(tokens, -1, 2 * shared).astype(f32), (shared, shared))
        x = jnp.concatenate([part.reshape(tokens, -1) for part in (q, k, v)], axis=-1).astype(f32)
        return x, z, b, a

    def partial(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        """The same as `__call__`, whose last projection has no bias."""
        return self(n, context)


def _split(x: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Splits the last axis."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return jnp.split(x, ends, axis=-1)


def of_length_one(x: jax.Array) -> jax.Array:
    """Scales vectors to length one."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + L2_EPS)
