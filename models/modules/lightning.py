"""The module of `LightningAttention`."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.kernels.recurrent.linear_attention import linear_attention
from llmjax.kernels.registry import Implementation, Operation
from llmjax.kernels.sharding import own_part, parts
from llmjax.models.layers.context import Context
from llmjax.models.layers.lightning import LightningAttention
from llmjax.models.layers.state import RecurrentState
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import build_norm, normed_together
from llmjax.models.modules.residual import mixed


class LightningAttentionModule(nnx.Module):
    """``out(sigmoid(gate(n)) * norm(read))``.

    Formula: Hugging Face's ``MiniMaxLightningAttention``.
    """

    # Positional arguments: x, module, before, after, context; static argument: residual.
    sublayer: ClassVar[Operation] = Operation("lightning attention sublayer", (Implementation("in steps", mixed),))
    divided: ClassVar[str] = "heads"
    last_bias: ClassVar[None] = None

    def __init__(self, spec: LightningAttention, size: int, *, dtype: jnp.dtype) -> None:
        self.spec, inner = spec, spec.heads * spec.head_dim
        by_head = ("heads", "hidden")
        # The rows are one head's query, key and value, then the next head's.
        self.qkv_proj = Linear(size, 3 * inner, bias=False, dtype=dtype, axes=by_head)
        self.output_gate = Linear(size, inner, bias=False, dtype=dtype, axes=by_head)
        self.norm = build_norm(spec.norm, inner, axes=("heads",))
        self.out_proj = Linear(inner, size, bias=False, dtype=dtype, axes=("hidden", "heads"))

    def __call__(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        """[T, D] to [T, D], and the state after the tokens."""
        spec, tokens, f32, used = self.spec, len(n), jnp.float32, context.batch.used
        state: RecurrentState = context.state
        assert state.memory is not None
        fused = ACTIVATIONS[spec.activation](self.qkv_proj(n, used).astype(f32))
        q, k, v = jnp.split(fused.reshape(tokens, spec.heads, -1), 3, axis=-1)
        whole, heads = spec.whole or spec.heads, jnp.arange(1, spec.heads * parts(self.divided) + 1, dtype=f32)
        rates = own_part(spec.decay * 2.0 ** (-8.0 * heads / whole), self.divided)
        decay = jnp.broadcast_to(-rates, (tokens, spec.heads))
        read, memory = linear_attention(q, k, v, decay, state.memory, context.batch, page_size=state.page_size)
        read = normed_together(read.reshape(tokens, -1), self.norm, whole * spec.head_dim, self.divided)
        read = (jax.nn.sigmoid(self.output_gate(n, used).astype(f32)) * read).astype(n.dtype)
        return self.out_proj(read, used), RecurrentState(None, memory, state.page_size)

    def partial(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        """The same as `__call__`, whose last projection has no bias."""
        return self(n, context)
