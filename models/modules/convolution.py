"""The module of `ShortConvolution`, and the convolution at the start of recurrent mixers."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.recurrent.convolution import causal_convolution
from llmjax.kernels.registry import Implementation, Operation
from llmjax.models.layers.context import Context
from llmjax.models.layers.convolution import ShortConvolution
from llmjax.models.layers.state import RecurrentState
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.parameter import parameter
from llmjax.models.modules.read_out import ReadOut
from llmjax.models.modules.residual import mixed


class Convolution(nnx.Module):
    """A convolution of each channel by itself: a weight f32 [channels, 1, width], whose last column is for the newest
    token, and an optional bias f32 [channels]."""

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        f32 = jnp.float32
        self.weight = parameter((channels, 1, width), f32, axes=("channels", None, None), plain=True)
        self.bias = parameter((channels,), f32, axes=("channels",)) if bias else None

    def __call__(self, x: jax.Array, state: RecurrentState, batch: RaggedBatch) -> tuple[jax.Array, jax.Array]:
        """[T, channels] to f32 [T, channels], and ``state.recent`` after the tokens."""
        assert state.recent is not None
        weight: jax.Array = self.weight.get_value()
        x, recent = causal_convolution(x, weight[:, 0], state.recent, batch, page_size=state.page_size)
        return (x if self.bias is None else x + self.bias.get_value()), recent


class ShortConvolutionModule(ReadOut):
    """``out(c * convolution(b * x))``, where b, c and x are the three parts of a projection.

    Formula: Hugging Face's ``Lfm2ShortConv``.
    """

    # Positional arguments: x, module, before, after, context; static argument: residual.
    sublayer: ClassVar[Operation] = Operation("short convolution sublayer", (Implementation("in steps", mixed),))
    divided: ClassVar[str] = "channels"

    def __init__(self, spec: ShortConvolution, size: int, *, dtype: jnp.dtype) -> None:
        self.spec, channels = spec, spec.size
        self.in_proj = Linear(size, 3 * channels, bias=spec.bias, dtype=dtype, axes=("parts", "hidden"))
        self.conv = Convolution(channels, spec.width, bias=spec.bias)
        self.out_proj = Linear(channels, size, bias=spec.bias, dtype=dtype, axes=("hidden", "channels"))

    def _read(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        state: RecurrentState = context.state
        b, c, x = jnp.split(self.in_proj(n, context.batch.used).astype(jnp.float32), 3, axis=-1)
        x, recent = self.conv(b * x, state, context.batch)
        return (c * x).astype(n.dtype), RecurrentState(recent, None, state.page_size)
