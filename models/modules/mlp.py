"""The modules of `GatedMLP` and `MLP`."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.kernels.blocks import MLPWeights
from llmjax.kernels.cpu import blocks as cpu
from llmjax.kernels.registry import Implementation, Operands, Operation
from llmjax.models.layers.context import Context
from llmjax.models.layers.mlp import MLP, XIELU, GatedMLP
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import NormModule, RMSNorm, build_norm, kernel_norm, normed_together
from llmjax.models.modules.parameter import parameter
from llmjax.models.modules.residual import fed_forward


class InnerModule(nnx.Module):
    """``down(inner(n))``."""

    sublayer: ClassVar[Operation]  # positional: x, module, before, after, context; static: residual
    divided: ClassVar[str] = "inner"  # the columns of ``down_proj``
    spec: GatedMLP | MLP
    up_proj: Linear
    down_proj: Linear
    gate_proj: Linear | None = None

    def inner(self, n: jax.Array, used: jax.Array | None = None) -> jax.Array:
        """The input of ``down_proj``, [T, inner]; for ``used`` see ``llmjax.kernels.linear.linear``."""
        raise NotImplementedError

    def __call__(self, n: jax.Array, context: Context | None = None) -> jax.Array:
        """[T, D] to [T, D]."""
        used = None if context is None else context.batch.used
        return self.down_proj(self.inner(n, used), used)

    def partial(self, n: jax.Array, context: Context | None = None) -> jax.Array:
        """`__call__` without the bias of ``down_proj``."""
        used = None if context is None else context.batch.used
        return self.down_proj.product(self.inner(n, used), used)

    @property
    def last_bias(self) -> jax.Array | None:
        """The bias that `partial` leaves out, [D]."""
        return self.down_proj.projection.bias

    def weights(self, before: NormModule | None, after: NormModule | None) -> MLPWeights:
        """The weights in the form that kernels take."""
        return MLPWeights(
            before=kernel_norm(before),
            gate=None if self.gate_proj is None else self.gate_proj.projection,
            up=self.up_proj.projection,
            down=self.down_proj.projection,
            after=kernel_norm(after),
        )


def _operands(
    x: jax.Array,
    mlp: InnerModule,
    before: NormModule | None,
    after: NormModule | None,
    context: Context | None,
    **options: bool,
) -> Operands:
    batch = None if context is None else context.batch
    return Operands(x, mlp.weights(before, after), batch, activation=mlp.spec.activation, **options)


# Positional arguments: x, module, before, after, context; static argument: residual.
MLP_SUBLAYER = Operation("MLP", (cpu.MLP.taking(_operands), Implementation("in steps", fed_forward)))
STEPPED_SUBLAYER = Operation("MLP", (Implementation("in steps", fed_forward),))


class GatedMLPModule(InnerModule):
    """``down(activation(gate(n)) * up(n))``; the activation is computed in f32."""

    sublayer: ClassVar[Operation] = MLP_SUBLAYER
    spec: GatedMLP
    gate_proj: Linear

    def __init__(self, spec: GatedMLP, size: int, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        self.gate_proj = Linear(size, spec.inner, bias=spec.bias, dtype=dtype, axes=("inner", "hidden"))
        self.up_proj = Linear(size, spec.inner, bias=spec.bias, dtype=dtype, axes=("inner", "hidden"))
        of_down = spec.bias if spec.down_bias is None else spec.down_bias
        self.down_proj = Linear(spec.inner, size, bias=of_down, dtype=dtype, axes=("hidden", "inner"))
        self.down_norm = None if spec.down_norm is None else build_norm(spec.down_norm, spec.inner, axes=("inner",))

    def inner(self, n: jax.Array, used: jax.Array | None = None) -> jax.Array:
        """The input of ``down_proj``, [T, inner]; for ``used`` see ``llmjax.kernels.linear.linear``."""
        gate = self.gate_proj(n, used).astype(jnp.float32)
        gate = gate if self.spec.gate_scale == 1 else gate * self.spec.gate_scale
        if self.spec.cutoff is not None:
            gate = jax.nn.relu(gate - gate.mean(-1, keepdims=True) - self.spec.cutoff * gate.std(-1, keepdims=True))
        gate = ACTIVATIONS[self.spec.activation](gate)
        inner = gate.astype(n.dtype) * self.up_proj(n, used)
        if self.down_norm is None:
            return inner
        assert isinstance(self.down_norm, RMSNorm)
        return normed_together(inner, self.down_norm, self.spec.whole or self.spec.inner, self.divided)


class SteppedGatedMLPModule(GatedMLPModule):
    """A gated MLP that the fused kernels do not support: with a scaled gate, a cutoff, or a norm."""

    sublayer: ClassVar[Operation] = STEPPED_SUBLAYER


def gated_mlp_module(spec: GatedMLP, size: int, *, dtype: jnp.dtype) -> GatedMLPModule:
    """The module for a hidden size of ``size``; ``dtype``: dtype of the matrices."""
    plain = spec.gate_scale == 1 and spec.cutoff is None and spec.down_norm is None
    return (GatedMLPModule if plain else SteppedGatedMLPModule)(spec, size, dtype=dtype)


class MLPModule(InnerModule):
    """``down(activation(up(n)))``; the activation is computed in f32."""

    sublayer: ClassVar[Operation] = MLP_SUBLAYER
    spec: MLP

    def __init__(self, spec: MLP, size: int, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        self.up_proj = Linear(size, spec.inner, bias=spec.bias, dtype=dtype, axes=("inner", "hidden"))
        self.down_proj = Linear(spec.inner, size, bias=spec.bias, dtype=dtype, axes=("hidden", "inner"))
        self.act_fn = XIELUModule() if spec.activation == XIELU else None

    def inner(self, n: jax.Array, used: jax.Array | None = None) -> jax.Array:
        """The input of ``down_proj``, [T, inner]; for ``used`` see ``llmjax.kernels.linear.linear``."""
        function = ACTIVATIONS[self.spec.activation] if self.act_fn is None else self.act_fn
        return function(self.up_proj(n, used).astype(jnp.float32)).astype(n.dtype)


class XIELUModule(nnx.Module):
    """``a x² + b x`` above 0, ``c (exp(min(x, eps)) - 1 - x) + b x`` below, where a and c come from learned parameters.

    Formula: Hugging Face's ``XIELUActivation``.
    """

    def __init__(self) -> None:
        self.alpha_p = parameter((1,), jnp.float32, axes=(None,))
        self.alpha_n = parameter((1,), jnp.float32, axes=(None,))
        self.beta = parameter((), jnp.float32, axes=())
        self.eps = parameter((), jnp.float32, axes=())

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the activation to f32 of any shape."""
        beta = self.beta.get_value()
        above = jax.nn.softplus(self.alpha_p.get_value())
        below = beta + jax.nn.softplus(self.alpha_n.get_value())
        curved = jnp.where(x > 0, above * jnp.square(x), below * (jnp.expm1(jnp.minimum(x, self.eps.get_value())) - x))
        return curved + beta * x
