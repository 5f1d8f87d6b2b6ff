"""The module of `ChannelDelta`."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.kernels.norm import rms_norm
from llmjax.kernels.recurrent.channel_delta import channel_delta
from llmjax.kernels.recurrent.convolution import causal_convolution
from llmjax.kernels.registry import Implementation, Operation
from llmjax.models.layers.channel_delta import ChannelDelta
from llmjax.models.layers.context import Context
from llmjax.models.layers.state import RecurrentState
from llmjax.models.modules.convolution import Convolution
from llmjax.models.modules.gated_delta import of_length_one
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.parameter import parameter
from llmjax.models.modules.residual import mixed


class ChannelDeltaModule(nnx.Module):
    """``o(norm(read) * sigmoid(g_b(g_a(n))))``, where q, k and v pass through convolutions first.

    Formula: Hugging Face's ``KimiLinearDeltaAttention``.
    """

    # Positional arguments: x, module, before, after, context; static argument: residual.
    sublayer: ClassVar[Operation] = Operation("channel delta sublayer", (Implementation("in steps", mixed),))
    divided: ClassVar[str] = "heads"
    last_bias: ClassVar[None] = None

    def __init__(self, spec: ChannelDelta, size: int, *, dtype: jnp.dtype) -> None:
        self.spec, f32 = spec, jnp.float32
        for part in "qkv":
            setattr(self, f"{part}_proj", Linear(size, spec.inner, bias=False, dtype=dtype, axes=("heads", "hidden")))
            setattr(self, f"{part}_conv1d", Convolution(spec.inner, spec.width))
        for part in "fg":
            setattr(self, f"{part}_a_proj", Linear(size, spec.head_dim, bias=False, dtype=dtype))
            second = Linear(spec.head_dim, spec.inner, bias=False, dtype=dtype, axes=("heads", None))
            setattr(self, f"{part}_b_proj", second)
        self.b_proj = Linear(size, spec.heads, bias=False, dtype=dtype, axes=("heads", "hidden"))
        self.dt_bias = parameter((spec.inner,), f32, axes=("heads",))
        self.A_log = parameter((1, 1, spec.heads, 1), f32, axes=(None, None, "heads", None), plain=True)
        self.o_norm = build_norm(spec.norm, spec.head_dim)
        self.o_proj = Linear(spec.inner, size, bias=False, dtype=dtype, axes=("hidden", "heads"))

    def __call__(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        """[T, D] to [T, D], and the state after the tokens."""
        spec, f32, used = self.spec, jnp.float32, context.batch.used
        state: RecurrentState = context.state
        assert state.memory is not None and state.recent is not None
        by_head = (len(n), spec.heads, spec.head_dim)
        x = jnp.concatenate([getattr(self, f"{part}_proj")(n, used) for part in "qkv"], axis=-1).astype(f32)
        weight = jnp.concatenate([getattr(self, f"{part}_conv1d").weight.get_value()[:, 0] for part in "qkv"])
        x, recent = causal_convolution(x, weight, state.recent, context.batch, page_size=state.page_size)
        q, k, v = (part.reshape(by_head) for part in jnp.split(ACTIVATIONS[spec.activation](x), 3, axis=-1))
        forgets = self.f_b_proj(self.f_a_proj(n, used), used).astype(f32) + self.dt_bias.get_value()
        read, memory = channel_delta(
            of_length_one(q) * spec.head_dim**-0.5,
            of_length_one(k),
            v,
            -jnp.exp(self.A_log.get_value()[0]) * jax.nn.softplus(forgets).reshape(by_head),
            jax.nn.sigmoid(self.b_proj(n, used).astype(f32)),
            state.memory,
            context.batch,
            page_size=state.page_size,
        )
        read = rms_norm(read.astype(n.dtype), self.o_norm.norm).astype(f32)
        gate = self.g_b_proj(self.g_a_proj(n, used), used).astype(f32).reshape(by_head)
        out = self.o_proj((read * jax.nn.sigmoid(gate)).astype(n.dtype).reshape(len(n), -1), used)
        return out, RecurrentState(recent, memory, state.page_size)

    def partial(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        """The same as `__call__`, whose last projection has no bias."""
        return self(n, context)
