"""Products with what stands before and after them in a decoder layer, so that an implementation may fuse it all.

A small operation of its own costs a device more than its arithmetic; on a CPU in particular the norms, activations and
sums of a layer would take longer than the products of a decode step. Weights are what ``kernels.linear`` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from kernels.activations import ACTIVATIONS
from kernels.linear import linear
from kernels.norm import Norm, rms_norm
from kernels.qtensor import QTensor
from kernels.registry import Implementation, Operation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projection:
    """A weight matrix and its bias."""

    weight: jax.Array | QTensor  # [out, in]
    bias: jax.Array | None = field(default=None)  # [out]


def norm_linears(x: jax.Array, norm: Norm | None, projections: Sequence[Projection]) -> tuple[jax.Array, ...]:
    """Several products with the same normed input.

    Args:
        x: [T, in].
        norm: applied to x first; None: nothing.

    Returns:
        ``linear(rms_norm(x, norm), …)`` of each projection, [T, out] in x's dtype.
    """
    out: tuple[jax.Array, ...] = NORM_LINEARS(x, norm, tuple(projections))
    return out


def norm_gated(x: jax.Array, norm: Norm | None, gate: Projection, up: Projection, *, activation: str) -> jax.Array:
    """``activation(gate(n)) * up(n)`` with ``n = rms_norm(x, norm)``; the activation is computed in f32.

    Args:
        x: [T, in].
        activation: a key of ACTIVATIONS.

    Returns:
        [T, out] in x's dtype.
    """
    out: jax.Array = NORM_GATED(x, norm, gate, up, activation=activation)
    return out


def linear_add(x: jax.Array, projection: Projection, norm: Norm | None, residual: jax.Array) -> jax.Array:
    """``residual + rms_norm(linear(x), norm)``.

    Args:
        x: [T, in].
        norm: of the product; None: nothing.
        residual: [T, out].

    Returns:
        [T, out] in residual's dtype.
    """
    out: jax.Array = LINEAR_ADD(x, projection, norm, residual)
    return out


def _normed(x: jax.Array, norm: Norm | None) -> jax.Array:
    return x if norm is None else rms_norm(x, norm)


def norm_linears_in_steps(
    x: jax.Array, norm: Norm | None, projections: tuple[Projection, ...]
) -> tuple[jax.Array, ...]:
    """``norm_linears`` operation by operation."""
    x = _normed(x, norm)
    return tuple(linear(x, projection.weight, projection.bias) for projection in projections)


def norm_gated_in_steps(
    x: jax.Array, norm: Norm | None, gate: Projection, up: Projection, *, activation: str
) -> jax.Array:
    """``norm_gated`` operation by operation."""
    gated, raised = norm_linears_in_steps(x, norm, (gate, up))
    return ACTIVATIONS[activation](gated.astype(jnp.float32)).astype(x.dtype) * raised


def linear_add_in_steps(x: jax.Array, projection: Projection, norm: Norm | None, residual: jax.Array) -> jax.Array:
    """``linear_add`` operation by operation."""
    return residual + _normed(linear(x, projection.weight, projection.bias), norm)


NORM_LINEARS = Operation("norm and products", (Implementation("in steps", norm_linears_in_steps),))
NORM_GATED = Operation("norm and gated products", (Implementation("in steps", norm_gated_in_steps),))
LINEAR_ADD = Operation("product and sum", (Implementation("in steps", linear_add_in_steps),))
