"""The feed-forward half of a layer as a mixture of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.blocks import Projection
from llmjax.kernels.experts import ExpertWeights
from llmjax.kernels.linear import linear
from llmjax.kernels.offloading import experts_anywhere
from llmjax.models.config import ExpertsConfig, ModelConfig
from llmjax.models.layers.linear import Linear
from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.norm import RMSNorm


class MoE(nnx.Module):
    """``x + after(sum of share * expert(n) + sigmoid(shared_expert_gate(n)) * shared_expert(n))``, ``n = before(x)``.

    Routers are in f32: a rounded score may choose another expert. Formula: Hugging Face's ``Qwen2MoeSparseMoeBlock``,
    of which ``Qwen3MoeSparseMoeBlock`` and ``MixtralSparseMoeBlock`` leave out the shared expert.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        assert config.experts is not None
        size, self.config, self.activation = config.hidden_size, config.experts, config.activation
        shared, router = self.config.shared_size, jnp.dtype(jnp.float32)
        self.gate = Linear(size, self.config.count, bias=False, dtype=router)
        self.experts = Experts(size, self.config, dtype=dtype)
        mlp = MLP(size, shared, bias=False, activation=self.activation, dtype=dtype) if shared else None
        self.shared_expert = mlp
        self.shared_expert_gate = Linear(size, 1, bias=False, dtype=router) if shared else None

    def __call__(self, x: jax.Array, batch: RaggedBatch, *, before: RMSNorm, after: RMSNorm | None) -> jax.Array:
        normed = before(x)
        chosen, shares = self.route(normed)
        # Tokens of padding all choose alike: they would make one group of choices as large as all others.
        real = jnp.arange(len(x)) < batch.query_start[-1]
        shares = jnp.where(real[:, None], shares, 0)
        out = experts_anywhere(normed, chosen, shares, self.experts.weights, activation=self.activation)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            score = _in_f32(normed, self.shared_expert_gate)
            out = out + jax.nn.sigmoid(score).astype(x.dtype) * self.shared_expert.alone(normed)
        return x + (out if after is None else after(out))

    def route(self, normed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The experts of each token, i32 [T, K], best first, and their shares, f32 [T, K].

        Args:
            normed: [T, D].
        """
        scores = jax.nn.softmax(_in_f32(normed, self.gate), axis=-1)
        shares, chosen = jax.lax.top_k(scores, self.config.per_token)
        if self.config.normalize:
            shares = shares / shares.sum(axis=-1, keepdims=True)
        return chosen.astype(jnp.int32), shares


class Experts(nnx.Module):
    """The experts of a layer, stacked; checkpoints hold them one by one or stacked."""

    def __init__(self, size: int, config: ExpertsConfig, *, dtype: jnp.dtype) -> None:
        count, inner = config.count, config.intermediate_size
        self.gate_proj = Stack(count, size, inner, dtype=dtype)
        self.up_proj = Stack(count, size, inner, dtype=dtype)
        self.down_proj = Stack(count, inner, size, dtype=dtype)

    @property
    def weights(self) -> ExpertWeights:
        """As kernels take them."""
        return ExpertWeights(self.gate_proj.projection, self.up_proj.projection, self.down_proj.projection)


class Stack(nnx.Module):
    """A weight [count, out, in]."""

    def __init__(self, count: int, size_in: int, size_out: int, *, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jax.ShapeDtypeStruct((count, size_out, size_in), dtype))

    @property
    def projection(self) -> Projection:
        """As kernels take it."""
        return Projection(self.weight.get_value())


def _in_f32(x: jax.Array, router: Linear) -> jax.Array:
    return linear(x.astype(jnp.float32), router.weight.get_value())
