"""RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467) in its two flavors, and layer norm (Ba et al. 2016,
arXiv:1607.06450)."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm:
    """A norm's weight and how it is applied.

    Attributes:
        weight: f32 [D].
        eps: added to the mean square.
        plus_one: the weight is stored less one and the product is taken in f32 (Gemma); otherwise ``x / rms(x)`` is
            rounded to x's dtype first (Llama and the rest).
        centered: a layer norm, which only kernels take that say so.
        bias: f32 [D], of a layer norm; None: none.
    """

    weight: jax.Array
    eps: float = field(metadata={"static": True})
    plus_one: bool = field(default=False, metadata={"static": True})
    centered: bool = field(default=False, metadata={"static": True})
    bias: jax.Array | None = None


def rms_norm(x: jax.Array, norm: Norm, *, mean_square: jax.Array | None = None) -> jax.Array:
    """``x / rms(x) * weight`` over the last axis, in x's dtype; the statistics are f32.

    Args:
        mean_square: f32 [..., 1], that of the whole vector where x is a part of one; None: x's own.
    """
    wide = x.astype(jnp.float32)
    if mean_square is None:
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + norm.eps)
    if norm.plus_one:
        return (normed * (1 + norm.weight.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * norm.weight.astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float) -> jax.Array:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last axis, in x's dtype; computed in f32.

    Args:
        weight, bias: [D], or [..., D] where x's axes before the last have weights of their own; bias None: none.
        eps: added to the variance.
    """
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + eps)
    normed = normed * weight.astype(jnp.float32)
    return (normed if bias is None else normed + bias.astype(jnp.float32)).astype(x.dtype)
