"""The module of `Mamba2`."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.kernels.norm import Norm, rms_norm
from llmjax.kernels.recurrent.linear_attention import linear_attention
from llmjax.kernels.registry import Implementation, Operation
from llmjax.kernels.sharding import all_sum, own_part
from llmjax.models.layers.context import Context
from llmjax.models.layers.mamba2 import Mamba2
from llmjax.models.layers.state import RecurrentState
from llmjax.models.modules.convolution import Convolution
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import RMSNorm, build_norm
from llmjax.models.modules.parameter import parameter
from llmjax.models.modules.residual import mixed


class Mamba2Module(nnx.Module):
    """``out(norm(read * silu(gate)))``, where x, B and C pass through a convolution first.

    With a time step d, a head's state S becomes ``exp(-d exp(A_log)) S + d B xᵀ``, and ``Cᵀ S + D x`` is read. Formula:
    Hugging Face's ``Mamba2Mixer``; ``FalconH1Mixer`` also has scaling factors.
    """

    # Positional arguments: x, module, before, after, context; static argument: residual.
    sublayer: ClassVar[Operation] = Operation("Mamba 2 sublayer", (Implementation("in steps", mixed),))
    divided: ClassVar[str] = "channels"  # channels of its heads; attention beside it is divided along "heads"

    def __init__(self, spec: Mamba2, size: int, *, dtype: jnp.dtype) -> None:
        self.spec, f32 = spec, jnp.float32
        self.in_proj = Linear(size, sum(spec.parts), bias=spec.in_bias, dtype=dtype, axes=("parts", "hidden"))
        self.conv1d = Convolution(spec.channels, spec.width, bias=spec.conv_bias)
        self.dt_bias = parameter((spec.heads,), f32, axes=("heads",))
        self.A_log = parameter((spec.heads,), f32, axes=("heads",))
        self.D = parameter((spec.heads,), f32, axes=("heads",))
        self.norm = None if spec.norm is None else build_norm(spec.norm, spec.inner, axes=("heads",))
        self.out_proj = Linear(spec.inner, size, bias=spec.out_bias, dtype=dtype, axes=("hidden", "heads"))

    def __call__(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        """[T, D] to [T, D], and the state after the tokens."""
        read, state = self._read(n, context)
        return _scaled(self.out_proj(read, context.batch.used), self.spec.out_scale), state

    def partial(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        """`__call__` without the bias of ``out_proj``."""
        read, state = self._read(n, context)
        return _scaled(self.out_proj.product(read, context.batch.used), self.spec.out_scale), state

    @property
    def last_bias(self) -> jax.Array | None:
        """The bias that `partial` leaves out, [D]."""
        bias = self.out_proj.projection.bias
        return None if bias is None else _scaled(bias, self.spec.out_scale)

    def _read(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        """The input of ``out_proj``, [T, inner], and the state after the tokens."""
        spec, tokens = self.spec, len(n)
        state: RecurrentState = context.state
        assert state.memory is not None
        parts = self._parts(self.in_proj(_scaled(n, spec.scale), context.batch.used).astype(jnp.float32))
        gate, steps = parts[0], parts[4]
        mixed_in, recent = self.conv1d(jnp.concatenate(parts[1:4], axis=-1), state, context.batch)
        x, b, c = _split(ACTIVATIONS[spec.activation](mixed_in), spec.parts[1:4])
        x = x.reshape(tokens, spec.heads, spec.head_dim)
        b, c = (part.reshape(tokens, spec.groups, spec.state_dim) for part in (b, c))
        steps = jnp.clip(jax.nn.softplus(steps + self.dt_bias.get_value()), *spec.steps)
        read, memory = linear_attention(
            c,
            b,
            x * steps[..., None],
            -jnp.exp(self.A_log.get_value()) * steps,
            state.memory,
            context.batch,
            page_size=state.page_size,
        )
        read = (read + x * self.D.get_value()[:, None]).reshape(tokens, spec.inner)
        return self._gated(read, gate).astype(n.dtype), RecurrentState(recent, memory, state.page_size)

    def _parts(self, projected: jax.Array) -> list[jax.Array]:
        """Gate, x, B, C and time steps, each with its scale."""
        parts = _split(projected, self.spec.parts)
        return [_scaled(part, scale) for part, scale in zip(parts, self.spec.part_scales, strict=True)]

    def _gated(self, read: jax.Array, gate: jax.Array) -> jax.Array:
        if self.norm is None:
            return read * jax.nn.silu(gate)
        if self.spec.norm_first:
            return self._normed(read) * jax.nn.silu(gate)
        return self._normed(read * jax.nn.silu(gate))

    def _normed(self, x: jax.Array) -> jax.Array:
        """The norm of [T, inner] over each group, also over the parts that other devices have."""
        assert isinstance(self.norm, RMSNorm)
        norm = self.norm.norm
        weight = norm.weight.reshape(self.spec.groups, -1)
        parts = x.reshape(len(x), *weight.shape)
        return rms_norm(parts, Norm(weight, norm.eps), mean_square=self._mean_squares(parts)).reshape(x.shape)

    def _mean_squares(self, parts: jax.Array) -> jax.Array | None:
        """Mean squares of whole groups, f32 [T, groups, 1], from parts [T, groups, .]; None: they are whole here."""
        whole = self.spec.divided
        if whole is None:
            return None
        of = own_part(jnp.asarray(whole.numbers, jnp.int32), self.divided)
        squares = jnp.square(parts.astype(jnp.float32)).sum(axis=-1)
        sums = all_sum(jnp.zeros((len(parts), whole.groups), jnp.float32).at[:, of].add(squares), self.divided)
        return sums[:, of, None] / whole.size


def _split(x: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Splits the last axis."""
    return jnp.split(x, [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)], axis=-1)


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1 else x * scale
