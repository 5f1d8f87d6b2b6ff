"""Mixture-of-experts products in C++ (``src/experts.cc``), also of rows with adapters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.adapted import Adapted, as_it_is
from llmjax.kernels.blocks import ExpertWeights
from llmjax.kernels.cpu import adapted, matrices
from llmjax.kernels.cpu.blocks import ACTIVATION_NUMBERS
from llmjax.kernels.cpu.library import library
from llmjax.kernels.qtensor import QTensor


def refuses(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: ExpertWeights, *, activation: str
) -> str | None:
    """Why the library does not take these types and sizes; None: it does."""
    if x.dtype != jnp.float32:
        return f"activations are {x.dtype}"
    if activation not in ACTIVATION_NUMBERS:
        return f"the activation is {activation}"
    if library() is None:
        return "not built"
    for weight in (weights.gate.weight, weights.up.weight, weights.down.weight):
        if isinstance(weight, Adapted):
            assert weight.delta is not None
            if reason := adapted.refuses_type(weight.delta):
                return reason
            if weight.delta.a.shape[1] != weight.shape[0]:
                return "adapters are of other experts too"
        stack = as_it_is(weight)
        if isinstance(stack, QTensor) and stack.columns is not None:
            return "columns are in an order of their own"
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack)
        if reason := matrices.refuses(one):
            return reason
    return None


def experts(
    x: jax.Array,
    chosen: jax.Array,
    shares: jax.Array,
    weights: ExpertWeights,
    *,
    activation: str,
) -> jax.Array:
    """``llmjax.kernels.experts.experts`` by the library, or ``adapted_experts`` where all weights are `Adapted`. An
    expert or a place that does not exist is an error."""
    projections = (weights.gate, weights.up, weights.down)
    stacks = [as_it_is(projection.weight) for projection in projections]
    count, inner, _ = weights.gate.weight.shape
    results = (
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        jax.ShapeDtypeStruct((chosen.size, x.shape[1] + 2 * inner), jnp.float32),
    )
    out: jax.Array
    out, _ = jax.ffi.ffi_call("llmjax_experts", results)(
        x,
        chosen.astype(jnp.int32),
        shares.astype(jnp.float32),
        *matrices.buffers(stacks, [projection.bias for projection in projections]),
        *adapted.buffers([p.weight for p in projections if isinstance(p.weight, Adapted)]),
        **matrices.attributes(stacks),
        experts=np.int32(count),
        inner=np.int32(inner),
        activation=np.int32(ACTIVATION_NUMBERS[activation]),
    )
    return out
