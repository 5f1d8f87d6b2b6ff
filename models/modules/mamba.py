"""The module of `Mamba`."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.kernels.recurrent.selective_scan import selective_scan
from llmjax.kernels.registry import Implementation, Operation
from llmjax.kernels.sharding import all_sum
from llmjax.models.layers.context import Context
from llmjax.models.layers.mamba import Mamba
from llmjax.models.layers.state import RecurrentState
from llmjax.models.modules.convolution import Convolution
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.parameter import parameter
from llmjax.models.modules.read_out import ReadOut
from llmjax.models.modules.residual import mixed, normed


class MambaModule(ReadOut):
    """``out((read + D x) * silu(gate))``, where x is convolved first, and time steps, B and C are projected from it.

    Formula: Hugging Face's ``MambaMixer``; ``JambaMambaMixer`` and ``FalconMambaMixer`` have norms inside.
    """

    # Positional arguments: x, module, before, after, context; static argument: residual.
    sublayer: ClassVar[Operation] = Operation("Mamba sublayer", (Implementation("in steps", mixed),))
    divided: ClassVar[str] = "channels"

    def __init__(self, spec: Mamba, size: int, *, dtype: jnp.dtype) -> None:
        self.spec, f32 = spec, jnp.float32
        self.in_proj = Linear(size, 2 * spec.inner, bias=spec.bias, dtype=dtype, axes=("parts", "hidden"))
        self.conv1d = Convolution(spec.inner, spec.width, bias=spec.conv_bias)
        made = spec.rank + 2 * spec.state_dim
        self.x_proj = Linear(spec.inner, made, bias=False, dtype=dtype, axes=(None, "channels"))
        self.dt_proj = Linear(spec.rank, spec.inner, bias=True, dtype=dtype, axes=("channels", None))
        self.A_log = parameter((spec.inner, spec.state_dim), f32, axes=("channels", None), plain=True)
        self.D = parameter((spec.inner,), f32, axes=("channels",))
        sizes = {"dt_layernorm": spec.rank, "b_layernorm": spec.state_dim, "c_layernorm": spec.state_dim}
        for name, entries in sizes.items():
            setattr(self, name, None if spec.norm is None else build_norm(spec.norm, entries))
        self.out_proj = Linear(spec.inner, size, bias=spec.bias, dtype=dtype, axes=("hidden", "channels"))

    def _read(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        """The input of ``out_proj``, [T, inner], and the state after the tokens."""
        spec, f32, used = self.spec, jnp.float32, context.batch.used
        state: RecurrentState = context.state
        assert state.memory is not None
        x, gate = jnp.split(self.in_proj(n, used).astype(f32), 2, axis=-1)
        x, recent = self.conv1d(x, state, context.batch)
        x = ACTIVATIONS[spec.activation](x)
        made = all_sum(self.x_proj(x.astype(n.dtype), used), self.divided)  # sums over all channels
        steps, b, c = jnp.split(made, (spec.rank, spec.rank + spec.state_dim), axis=-1)
        steps, b, c = normed(steps, self.dt_layernorm), normed(b, self.b_layernorm), normed(c, self.c_layernorm)
        read, memory = selective_scan(
            c.astype(f32),
            b.astype(f32),
            x,
            jax.nn.softplus(self.dt_proj(steps, used).astype(f32)),
            -jnp.exp(self.A_log.get_value()).T,
            state.memory,
            context.batch,
            page_size=state.page_size,
        )
        read = (read + x * self.D.get_value()) * jax.nn.silu(gate)
        return read.astype(n.dtype), RecurrentState(recent, memory, state.page_size)
