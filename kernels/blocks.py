"""The two halves of a decoder layer, each as one operation so that an implementation may fuse it all.

A small operation of its own costs a device more than its arithmetic; on a CPU in particular the norms, rotations,
activations and sums of a layer would take longer than the products of a decode step. Weights are what
``llmjax.kernels.linear`` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.kernels.attention import KVPages, RaggedBatch, attend
from llmjax.kernels.cpu import blocks as cpu
from llmjax.kernels.cpu.library import library
from llmjax.kernels.linear import linear
from llmjax.kernels.norm import Norm, rms_norm
from llmjax.kernels.qtensor import QTensor
from llmjax.kernels.registry import Implementation, Operation
from llmjax.kernels.rope import Rotation, rotate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projection:
    """A weight matrix and its bias."""

    weight: jax.Array | QTensor  # [out, in]
    bias: jax.Array | None = field(default=None)  # [out]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionWeights:
    """``x + after(o(attention(q_norm(q(n)), k_norm(k(n)), v(n))))`` with ``n = before(x)``; None: no norm."""

    before: Norm | None
    q: Projection
    k: Projection
    v: Projection
    q_norm: Norm | None  # over the head size
    k_norm: Norm | None
    o: Projection
    after: Norm | None


@dataclass(frozen=True)
class AttentionRules:
    """What is static about a layer's attention; see ``kernels.rope.rotate`` and ``kernels.attention.attend``."""

    scale: float
    interleaved: bool = False
    window: int | None = None
    softcap: float | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLPWeights:
    """``x + after(down(activation(gate(n)) * up(n)))`` with ``n = before(x)``; None: no norm."""

    before: Norm | None
    gate: Projection
    up: Projection
    down: Projection
    after: Norm | None


def attention_block(
    x: jax.Array,
    weights: AttentionWeights,
    by: Rotation,
    pages: KVPages,
    batch: RaggedBatch,
    sinks: jax.Array | None = None,
    *,
    rules: AttentionRules,
) -> tuple[jax.Array, KVPages]:
    """The attention half of a layer.

    Args:
        x: [T, D].
        by: how the queries and keys of each token are rotated.
        pages: the layer's pages, rewritten in place when donated.
        sinks: f32 [H], see ``llmjax.kernels.attention.attend``.

    Returns:
        [T, D] in x's dtype, and the pages with the tokens' keys and values stored.
    """
    out: tuple[jax.Array, KVPages] = ATTENTION_BLOCK(x, weights, by, pages, batch, sinks, rules=rules)
    return out


def mlp(x: jax.Array, weights: MLPWeights, *, activation: str) -> jax.Array:
    """The gated feed-forward half of a layer; the activation is computed in f32.

    Args:
        x: [T, D].
        activation: a key of ACTIVATIONS.

    Returns:
        [T, D] in x's dtype.
    """
    out: jax.Array = MLP(x, weights, activation=activation)
    return out


def attention_heads(
    x: jax.Array,
    weights: AttentionWeights,
    by: Rotation,
    pages: KVPages,
    batch: RaggedBatch,
    sinks: jax.Array | None = None,
    *,
    rules: AttentionRules,
) -> tuple[jax.Array, KVPages]:
    """``attention_block`` as far as what ``o`` is given, [T, H * h], operation by operation."""
    projected = _projected(x, weights.before, (weights.q, weights.k, weights.v))
    q, k, v = (y.reshape(len(x), -1, pages.data.shape[-1]) for y in projected)
    q, k = _normed(q, weights.q_norm), _normed(k, weights.k_norm)
    q, k = (rotate(heads, by, interleaved=rules.interleaved) for heads in (q, k))
    out, pages = attend(
        q, k, v, pages, batch, scale=rules.scale, window=rules.window, softcap=rules.softcap, sinks=sinks
    )
    return out.reshape(len(x), -1), pages


def mlp_inner(x: jax.Array, weights: MLPWeights, *, activation: str) -> jax.Array:
    """``mlp`` as far as what ``down`` is given, [T, inner], operation by operation."""
    gated, raised = _projected(x, weights.before, (weights.gate, weights.up))
    return ACTIVATIONS[activation](gated.astype(jnp.float32)).astype(x.dtype) * raised


def _normed(x: jax.Array, norm: Norm | None) -> jax.Array:
    return x if norm is None else rms_norm(x, norm)


def _projected(x: jax.Array, norm: Norm | None, projections: Sequence[Projection]) -> list[jax.Array]:
    x = _normed(x, norm)
    return [linear(x, projection.weight, projection.bias) for projection in projections]


def _added(x: jax.Array, inner: jax.Array, projection: Projection, norm: Norm | None) -> jax.Array:
    return x + _normed(linear(inner, projection.weight, projection.bias), norm)


def attention_block_in_steps(
    x: jax.Array, weights: AttentionWeights, *arguments: Any, rules: AttentionRules
) -> tuple[jax.Array, KVPages]:
    """``attention_block`` operation by operation."""
    out, pages = attention_heads(x, weights, *arguments, rules=rules)
    return _added(x, out, weights.o, weights.after), pages


def mlp_in_steps(x: jax.Array, weights: MLPWeights, *, activation: str) -> jax.Array:
    """``mlp`` operation by operation."""
    return _added(x, mlp_inner(x, weights, activation=activation), weights.down, weights.after)


def _native_attention_block(*arguments: Any, **rules: Any) -> tuple[jax.Array, KVPages]:
    native = library()
    assert native is not None
    return cpu.attention_block(*arguments, native=native, **rules)


def _attention_block_refuses(*arguments: Any, **_: Any) -> str | None:
    return cpu.attention_block_refuses(*arguments)


def _native_mlp(*arguments: Any, **rules: Any) -> jax.Array:
    native = library()
    assert native is not None
    return cpu.mlp(*arguments, native=native, **rules)


# Positional: x, weights, by, pages, batch, sinks. Static: rules.
ATTENTION_BLOCK = Operation(
    "attention block",
    (
        Implementation("C++", _native_attention_block, platform="cpu", refuses=_attention_block_refuses),
        Implementation("in steps", attention_block_in_steps),
    ),
)
# Positional: x, weights. Static: activation.
MLP = Operation(
    "gated MLP",
    (
        Implementation("C++", _native_mlp, platform="cpu", refuses=cpu.mlp_refuses),
        Implementation("in steps", mlp_in_steps),
    ),
)
