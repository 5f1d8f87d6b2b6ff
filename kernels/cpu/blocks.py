"""The sublayers of a decoder layer in C++ (``src/blocks.cc``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.activations import CLAMPED_SWIGLU, NORMAL_CDF
from llmjax.kernels.adapted import Adapted, as_it_is
from llmjax.kernels.attention.types import KVPages, RaggedBatch
from llmjax.kernels.blocks import AttentionRules, AttentionWeights, MLPWeights, Projection
from llmjax.kernels.cpu import adapted, matrices
from llmjax.kernels.cpu import attention as cpu_attention
from llmjax.kernels.cpu.library import library
from llmjax.kernels.norm import Norm
from llmjax.kernels.qtensor import QTensor
from llmjax.kernels.registry import Implementation
from llmjax.kernels.rope import Rotation

# Activations by their number in src/kernels.h; others go operation by operation.
ACTIVATION_NUMBERS: Mapping[str, int] = MappingProxyType(
    {
        "silu": 0,
        "swish": 0,
        "gelu_new": 1,
        "gelu_fast": 1,
        "gelu_pytorch_tanh": 1,
        "quick_gelu": 2,
        CLAMPED_SWIGLU: 3,
        "gelu": 4,
        NORMAL_CDF: 5,
        "relu": 6,
        "relu2": 7,
    }
)

PAGES_ARGUMENT = 7  # of an attention block, its result 1


def mlp_refuses(x: jax.Array, weights: MLPWeights, *_: Any, activation: str, **__: Any) -> str | None:
    """Why the library does not take these types and sizes; None: it does."""
    if activation not in ACTIVATION_NUMBERS:
        return f"the activation is {activation}"
    return _refuses(x, _projections(weights))


def attention_block_refuses(
    x: jax.Array, weights: AttentionWeights, by: Rotation, pages: KVPages, batch: RaggedBatch | None = None, **_: Any
) -> str | None:
    """Why the library does not take these types and sizes; None: it does."""
    if batch is not None and not batch.sees_all:
        return "tokens see others than those before them"
    heads = jax.ShapeDtypeStruct((x.shape[0], 1, pages.head_dim), x.dtype)
    projections = (weights.q, weights.k, weights.v, weights.o)
    return _refuses(x, projections) or cpu_attention.refuses(heads, pages)


def _refuses(x: jax.Array, projections: Sequence[Projection]) -> str | None:
    if x.dtype != jnp.float32:
        return f"activations are {x.dtype}"
    native = library()
    if native is None:
        return "not built"
    weights = [projection.weight for projection in projections]
    if any(isinstance(weight, Adapted) for weight in weights) and not all(_has_delta(weight) for weight in weights):
        return "only some of the matrices have adapters"
    for weight in map(as_it_is, weights):
        if isinstance(weight, QTensor) and weight.columns is not None:
            return "columns are in an order of their own"
        if reason := matrices.refuses(weight) or matrices.slow(x.shape[0], weight, native):
            return reason
    return None


def _has_delta(weight: jax.Array | QTensor | Adapted) -> bool:
    return isinstance(weight, Adapted) and weight.delta is not None


def mlp(
    x: jax.Array,
    weights: MLPWeights,
    batch: RaggedBatch | None = None,
    *,
    activation: str,
    residual: bool = True,
) -> jax.Array:
    """The feed-forward sublayer of a layer; the activation is computed in f32.

    Args:
        x: f32 [T, D].
        batch: the batch whose tokens they are: padding after them comes out as zeros and takes no time; None: all are
            computed.
        activation: a key of ACTIVATION_NUMBERS.
        residual: False: only the product of ``down``, without bias, ``after`` and x.

    Returns:
        f32 [T, D].
    """
    if not residual:
        weights = replace(weights, down=Projection(weights.down.weight), after=None)
    projections = _projections(weights)
    inner = weights.up.weight.shape[0]
    scratch = (
        _columns(weights.before, x) + (len(projections) - 1) * inner + _product_columns(weights.after, x, projections)
    )
    out: jax.Array
    out, _ = jax.ffi.ffi_call("llmjax_mlp", (_floats(*x.shape), _floats(len(x), scratch)))(
        x,
        *(_weight(norm) for norm in (weights.before, weights.after)),
        matrices.rows_in_use(None if batch is None else batch.used),
        *_buffers(projections),
        **_attributes(projections),
        norms=_settings(weights.before, weights.after),
        inner=np.int32(inner),
        activation=np.int32(ACTIVATION_NUMBERS[activation]),
        residual=residual,
        decode=batch is not None and batch.decode,
    )
    return out


def attention_block(
    x: jax.Array,
    weights: AttentionWeights,
    by: Rotation,
    pages: KVPages,
    batch: RaggedBatch,
    sinks: jax.Array | None = None,
    *,
    rules: AttentionRules,
    residual: bool = True,
) -> tuple[jax.Array, KVPages]:
    """The attention sublayer of a layer. A page or place out of range is an error, not a stray write; padding after the
    batch's tokens comes out as zeros, and takes no time.

    Args:
        x: f32 [T, D].
        by: how the queries and keys of each token are rotated.
        pages: the layer's pages, rewritten in place when donated.
        sinks: f32 [H], see ``llmjax.kernels.attention.attend``.
        residual: False: only the product of ``o``, without bias, ``after`` and x.

    Returns:
        f32 [T, D], and the pages with the tokens' keys and values stored.
    """
    if not residual:
        weights = replace(weights, o=Projection(weights.o.weight), after=None)
    projections = (weights.q, weights.k, weights.v, weights.o)
    norms = (weights.before, weights.q_norm, weights.k_norm, weights.after)
    q_size, kv_size = weights.q.weight.shape[0], weights.k.weight.shape[0]
    scratch = _columns(weights.before, x) + 2 * q_size + 2 * kv_size + _product_columns(weights.after, x, projections)
    call = jax.ffi.ffi_call(
        "llmjax_attention_block",
        (_floats(*x.shape), jax.ShapeDtypeStruct(pages.data.shape, pages.data.dtype), _floats(len(x), scratch)),
        input_output_aliases={PAGES_ARGUMENT: 1},
    )
    out, data, _ = call(
        x,
        *(_weight(norm) for norm in norms),
        by.cos,
        by.sin,
        *cpu_attention.buffers(pages, batch, sinks),
        *_buffers(projections),
        **_attributes(projections),
        norms=_settings(*norms),
        heads=np.int32(q_size // pages.data.shape[-1]),
        interleaved=rules.interleaved,
        residual=residual,
        **cpu_attention.attributes(
            pages, batch, scale=rules.scale, window=rules.window, causal=rules.causal, softcap=rules.softcap
        ),
    )
    return out, pages.with_data(data)


def _projections(weights: MLPWeights) -> tuple[Projection, ...]:
    return (*(() if weights.gate is None else (weights.gate,)), weights.up, weights.down)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _buffers(projections: Sequence[Projection]) -> list[jax.Array]:
    """Weights and biases; then the places of rows and what adapters change of each weight, if there are any."""
    buffers = matrices.buffers([as_it_is(p.weight) for p in projections], [p.bias for p in projections])
    return buffers + adapted.buffers([p.weight for p in projections if isinstance(p.weight, Adapted)])


def _attributes(projections: Sequence[Projection]) -> dict[str, Any]:
    return matrices.attributes([as_it_is(projection.weight) for projection in projections])


def _columns(norm: Norm | None, x: jax.Array) -> int:
    """Columns of scratch for rows that are normed."""
    return 0 if norm is None else x.shape[1]


def _product_columns(after: Norm | None, x: jax.Array, projections: Sequence[Projection]) -> int:
    """Columns of scratch for the last product, if something is done to it before x is added."""
    return x.shape[1] if isinstance(projections[-1].weight, Adapted) else _columns(after, x)


def _weight(norm: Norm | None) -> jax.Array:
    return jnp.zeros(0, jnp.float32) if norm is None else norm.weight.astype(jnp.float32)


def _settings(*norms: Norm | None) -> np.ndarray:
    """eps and plus_one of each norm."""
    return np.array([(0, 0) if norm is None else (norm.eps, norm.plus_one) for norm in norms], np.float32).reshape(-1)


ATTENTION_BLOCK = Implementation("C++", attention_block, platform="cpu", refuses=attention_block_refuses)
MLP = Implementation("C++", mlp, platform="cpu", refuses=mlp_refuses)
