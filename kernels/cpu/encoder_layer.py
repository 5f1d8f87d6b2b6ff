"""The layer of an encoder in C++ (``src/encoder_layer.cc``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.adapted import Adapted
from llmjax.kernels.cpu import matrices, segments
from llmjax.kernels.cpu.blocks import ACTIVATION_NUMBERS
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.kernels.cpu.library import library
from llmjax.kernels.encoder_layer import EncoderLayerRules, EncoderLayerWeights
from llmjax.kernels.norm import Norm
from llmjax.kernels.qtensor import QTensor

PAIRS: Mapping[str, int] = MappingProxyType({"half": 0, "quarter": 1, "adjacent": 2})
ROWS_OF_CORE = 256
"""Rows that a core takes through the MLP at once: what lies between its products then stays in the core's cache."""


def refuses(x: jax.Array, weights: EncoderLayerWeights, rules: EncoderLayerRules) -> str | None:
    """Why the library does not take these types and sizes, or is not the fastest; None: it does."""
    if x.dtype != jnp.float32:
        return f"activations are {x.dtype}"
    if rules.activation not in ACTIVATION_NUMBERS:
        return f"the activation is {rules.activation}"
    native = library()
    if native is None:
        return "not built"
    for projection in weights.projections:
        weight = projection.weight
        if isinstance(weight, QTensor) and weight.columns is not None:
            return "columns are in an order of their own"
        if isinstance(weight, Adapted):
            return "adapters change it"
        if reason := matrices.refuses(weight, x.shape[0]) or matrices.slow(x.shape[0], weight, native):
            return reason
    return segments.refuses(x, rules.dtype)


def encoder_layer(
    x: jax.Array,
    weights: EncoderLayerWeights,
    turns: tuple[jax.Array, jax.Array] | None,
    segment_ids: jax.Array,
    rules: EncoderLayerRules,
) -> jax.Array:
    """One layer; tokens of no segment after the last one come out as zeros, and take no time.

    Args:
        x: f32 [T, D].
        turns: cosines and sines of the angles of each pair of a head's entries, f32 [T, head_dim / 2]; None: there are
            no rotary positions.
        segment_ids: i32 [T], see ``llmjax.kernels.attention.segments.attend_segments``.

    Returns:
        f32 [T, D].
    """
    tokens, size = x.shape
    wide, inner = weights.q.weight.shape[0], weights.up.weight.shape[0]
    head_dim, block = wide // rules.heads, min(ROWS_OF_CORE * usable_cores(), tokens)
    scratch = tokens * (size + 4 * wide) + block * (size + wide + inner * (1 if weights.gate is None else 2))
    norms = (weights.before, weights.second, weights.q_norm, weights.k_norm)
    nothing = jnp.zeros(0, jnp.float32)
    cos, sin = (nothing, nothing) if turns is None else turns
    results = (
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        jax.ShapeDtypeStruct((scratch,), jnp.float32),
        segments.room(rules.heads, tokens, head_dim, rules.dtype),
    )
    plain = [projection.weight for projection in weights.projections]
    assert not any(isinstance(weight, Adapted) for weight in plain)
    out: jax.Array
    out, _, _ = jax.ffi.ffi_call("llmjax_encoder_layer", results)(
        x,
        cos,
        sin,
        segment_ids,
        *matrices.buffers(plain, [projection.bias for projection in weights.projections]),
        *(array for norm in norms for array in _arrays(norm)),
        **matrices.attributes(plain),
        norms=np.array([_numbers(norm) for norm in norms], np.float32).reshape(-1),
        heads=np.int32(rules.heads),
        head_dim=np.int32(head_dim),
        inner=np.int32(inner),
        rows_of_block=np.int32(block),
        activation=np.int32(ACTIVATION_NUMBERS[rules.activation]),
        pairs=np.int32(PAIRS[rules.pairs]),
        whole=rules.whole,
        scale=np.float32(rules.scale),
    )
    return out


def _arrays(norm: Norm | None) -> tuple[jax.Array, jax.Array]:
    """Weight and bias, empty for none."""
    nothing = jnp.zeros(0, jnp.float32)
    if norm is None:
        return nothing, nothing
    return norm.weight.astype(jnp.float32), nothing if norm.bias is None else norm.bias.astype(jnp.float32)


def _numbers(norm: Norm | None) -> tuple[float, float, float]:
    """What ``encoder_norm`` in the source takes."""
    return (0.0, 0.0, 0.0) if norm is None else (norm.eps, norm.plus_one, norm.centered)
