"""The module of `Experts`."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.norm import Norm, rms_norm
from llmjax.kernels.offloading import experts_anywhere
from llmjax.kernels.registry import Implementation, Operation
from llmjax.kernels.sharding import own_number, own_range, parts
from llmjax.models.layers.context import Context
from llmjax.models.layers.mlp import MLP, GatedMLP
from llmjax.models.layers.moe import AS_GATE, Experts
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.mlp import GatedMLPModule, InnerModule, MLPModule
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.parameter import parameter
from llmjax.models.modules.residual import fed_forward, normed

SCORES = MappingProxyType({"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid})


class ExpertsModule(nnx.Module):
    """``sum of share * expert(n) + sigmoid(shared_expert_gate(n)) * shared_expert(n)``.

    Routers are in f32, since a rounded score may choose another expert. Formulas: Hugging Face's
    ``Qwen2MoeSparseMoeBlock``, of which ``Qwen3MoeSparseMoeBlock`` and ``MixtralSparseMoeBlock`` leave out the shared
    expert; ``DeepseekV2Moe``, whose shared expert has no gate; ``DeepseekV3MoE``, with sigmoids and corrections;
    ``NemotronHMoE``, whose experts have no gates and may work on a latent vector; ``Gemma4TextDecoderLayer``, with
    norms inside, whose MLP is the shared expert.
    """

    # Positional arguments: x, module, before, after, context; static argument: residual.
    sublayer: ClassVar[Operation] = Operation("mixture of experts", (Implementation("in steps", fed_forward),))
    divided: ClassVar[str] = "inner"  # the columns of each expert's ``down_proj``, or whole experts

    def __init__(self, spec: Experts, size: int, *, dtype: jnp.dtype) -> None:
        router, self.spec = jnp.dtype(jnp.float32), spec
        self.gate = Router(size, spec)
        self.experts = Stacks(spec.latent or size, spec, dtype=dtype)
        if spec.latent is not None:
            self.fc1_latent_proj = Linear(size, spec.latent, bias=False, dtype=dtype)
            self.fc2_latent_proj = Linear(spec.latent, size, bias=False, dtype=dtype)
        norms = spec.own_norms
        self.before_experts = None if norms is None else build_norm(norms, size)
        self.after_experts = None if norms is None else build_norm(norms, size)
        if (shared := spec.shared) is not None:
            self.before_shared = None if norms is None else build_norm(norms, size)
            self.after_shared = None if norms is None else build_norm(norms, size)
            if spec.gated:
                one = GatedMLP(inner=shared.inner, activation=spec.activation)
                mlp: InnerModule = GatedMLPModule(one, size, dtype=dtype)
            else:
                mlp = MLPModule(MLP(inner=shared.inner, activation=spec.activation, bias=False), size, dtype=dtype)
            setattr(self, shared.name, mlp)
            if shared.gated:
                setattr(self, f"{shared.name}_gate", Linear(size, 1, bias=False, dtype=router))

    def __call__(self, n: jax.Array, context: Context) -> jax.Array:
        """[T, D] to [T, D]."""
        out = self.partial(n, context)
        return out if self.last_bias is None else out + self.last_bias.astype(out.dtype)

    @property
    def last_bias(self) -> jax.Array | None:
        """The bias that `partial` leaves out, [D]."""
        bias = self.experts.bias
        return None if bias is None else bias.get_value()

    def partial(self, n: jax.Array, context: Context) -> jax.Array:
        """`__call__` without the bias of the sum; the result is linear in the last projections."""
        given, chosen, shares = self.dispatched(n, context)
        chosen, shares = self._own(chosen, shares)
        activation = self.spec.activation if self.spec.gated else AS_GATE[self.spec.activation]
        out = experts_anywhere(given, chosen, shares, self.experts.weights, activation=activation)
        if self.spec.scaled_inputs:
            out = out.reshape(len(n), -1, out.shape[1]).sum(axis=1)
        if self.spec.latent is not None:
            out = self.fc2_latent_proj(out, context.batch.used)
        out = normed(out, self.after_experts)
        if (shared := self.spec.shared) is not None:
            added = normed(getattr(self, shared.name)(normed(n, self.before_shared), context), self.after_shared)
            if shared.gated:
                score = _in_f32(n, getattr(self, f"{shared.name}_gate"))
                added = jax.nn.sigmoid(score).astype(n.dtype) * added
            out = out + added
        return out

    def dispatched(self, n: jax.Array, context: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The input of the experts, [N, in], the experts of each row, i32 [N, k], and their shares, f32 [N, k]."""
        chosen, shares = self.route(n)
        # Padding tokens all choose the same experts, which would make one group as large as all others together.
        real = jnp.arange(len(n)) < context.batch.used
        shares = jnp.where(real[:, None], shares, 0)
        inputs = normed(n, self.before_experts)
        if self.spec.latent is not None:
            inputs = self.fc1_latent_proj(inputs, context.batch.used)
        if self.spec.scaled_inputs:  # each expert gets the token times its own share
            inputs = (inputs[:, None] * shares[..., None]).astype(n.dtype).reshape(-1, inputs.shape[1])
            chosen = chosen.reshape(-1, 1)
            shares = jnp.repeat(real, self.spec.per_token)[:, None].astype(jnp.float32)
        return inputs, chosen, shares

    def _own(self, chosen: jax.Array, shares: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The chosen experts by their index in this device's stacks; experts of other devices get no share."""
        if self.spec.held is None:
            return chosen, shares
        first, last = own_range("experts", self.spec.count)
        here = (first <= chosen) & (chosen < last)
        return jnp.where(here, chosen - first, 0), jnp.where(here, shares, 0)

    def route(self, n: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The experts of each token, i32 [T, K], best first, and their shares, f32 [T, K].

        Args:
            n: [T, D].
        """
        spec = self.spec
        logits = _in_f32(self.gate.given(n), self.gate)
        if spec.score == "sparse mixer":
            return sparse_mixer(logits, spec.margin)
        scores = SCORES[spec.score](logits)
        compared = self.gate.corrected(scores)
        if (groups := spec.groups) is not None:
            by_group = compared.reshape(len(n), groups.count, -1)
            best, _ = jax.lax.top_k(by_group, groups.best)
            _, kept = jax.lax.top_k(best.sum(axis=-1), groups.kept)
            is_kept = jax.nn.one_hot(kept, groups.count, dtype=bool).any(axis=1)
            compared = jnp.where(is_kept[..., None], by_group, -jnp.inf).reshape(scores.shape)
        _, chosen = jax.lax.top_k(compared, spec.per_token)
        shares = jnp.take_along_axis(scores, chosen, axis=-1)
        if spec.normalize:
            shares = shares / (shares.sum(axis=-1, keepdims=True) + spec.no_share)
        return chosen.astype(jnp.int32), self.gate.scaled(shares, chosen) * spec.scaling


class Router(Linear):
    """Scores experts, [T, D] to [T, E], in f32."""

    def __init__(self, size: int, spec: Experts) -> None:
        super().__init__(size, spec.count, bias=spec.bias, dtype=jnp.dtype(jnp.float32))
        self.e_score_correction_bias = parameter((spec.count,), jnp.float32, axes=(None,)) if spec.corrected else None
        self.norm = spec.own_norms
        if self.norm is not None:
            self.scale = parameter((size,), jnp.float32, axes=(None,))
            self.per_expert_scale = parameter((spec.count,), jnp.float32, axes=(None,))

    def corrected(self, scores: jax.Array) -> jax.Array:
        """Scores with the correction, for the choice of experts."""
        return scores if self.e_score_correction_bias is None else scores + self.e_score_correction_bias.get_value()

    def given(self, n: jax.Array) -> jax.Array:
        """The router's input from the sublayer's input, both [T, D]."""
        if self.norm is None:
            return n
        return rms_norm(n.astype(jnp.float32), Norm(self.scale.get_value(), self.norm.eps)) * n.shape[1] ** -0.5

    def scaled(self, shares: jax.Array, chosen: jax.Array) -> jax.Array:
        """Shares of the chosen experts, both [T, K], times the experts' factors."""
        return shares if self.norm is None else shares * self.per_expert_scale.get_value()[chosen]


class Stacks(nnx.Module):
    """The experts of a layer, stacked; checkpoints hold them one by one or stacked."""

    def __init__(self, size: int, spec: Experts, *, dtype: jnp.dtype) -> None:
        self.held = spec.held
        gate = Stack(spec, size, spec.inner, dtype=dtype, axes=("inner", "hidden")) if spec.gated else None
        self.gate_proj = gate
        self.up_proj = Stack(spec, size, spec.inner, dtype=dtype, axes=("inner", "hidden"))
        self.down_proj = Stack(spec, spec.inner, size, dtype=dtype, axes=("hidden", "inner"))
        self.bias = parameter((size,), jnp.float32, axes=(None,)) if spec.out_bias else None

    @property
    def weights(self) -> ExpertWeights:
        """The weights in the form that kernels take: an MLP without a gate is its own gate, see AS_GATE."""
        down, up = self.down_proj.projection, self.up_proj.projection
        if self.held is None and parts("inner") > 1 and down.bias is not None:  # only one device adds it to the sum
            down = Projection(down.weight, jnp.where(own_number("inner") == 0, down.bias, 0))
        return ExpertWeights(up if self.gate_proj is None else self.gate_proj.projection, up, down)


class Stack(nnx.Module):
    """A weight [E, out, in] with an optional bias [E, out]; ``axes``: logical names of the last two axes."""

    def __init__(self, spec: Experts, size_in: int, size_out: int, *, dtype: jnp.dtype, axes: tuple[str, str]) -> None:
        count, of_bias = spec.stacked, ("experts", axes[0])
        self.weight = parameter((count, size_out, size_in), dtype, axes=("experts", *axes))
        self.bias = parameter((count, size_out), jnp.float32, axes=of_bias, plain=True) if spec.bias else None

    @property
    def projection(self) -> Projection:
        """The weight and bias in the form that kernels take."""
        return Projection(self.weight.get_value(), None if self.bias is None else self.bias.get_value())


def sparse_mixer(logits: jax.Array, margin: float) -> tuple[jax.Array, jax.Array]:
    """Chooses two experts, each the best of those left, with its share among the experts that score close to it.

    Formula: SparseMixer-v2 (Liu et al. 2024, arXiv:2409.12136) as Hugging Face's ``sparsemixer`` has it, without noise.

    Args:
        logits: f32 [T, E].
        margin: how far an expert's logit may be below the best one, as a part of the larger of the two, to get a share.

    Returns:
        i32 [T, 2], and shares f32 [T, 2], which do not add up to one.
    """
    left, chosen, shares = logits, [], []
    for _ in range(2):
        best = left.max(axis=-1, keepdims=True)
        is_near = (best - logits) <= margin * jnp.maximum(jnp.abs(logits), best)
        chosen.append(left.argmax(axis=-1))
        shares.append(1 / jnp.where(is_near, jnp.exp(left - best), 0).sum(axis=-1))
        left = jnp.where(jax.nn.one_hot(chosen[-1], logits.shape[1], dtype=bool), -jnp.inf, left)
    return jnp.stack(chosen, axis=-1).astype(jnp.int32), jnp.stack(shares, axis=-1)


def _in_f32(x: jax.Array, router: Linear) -> jax.Array:
    return router(x.astype(jnp.float32))
