"""The two ways in which models use weight matrices, plain or quantized."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.adapted import Adapted
from llmjax.kernels.adapted_linear import changed, changed_rows
from llmjax.kernels.dense_linear import LINEAR, PANEL_LINEAR
from llmjax.kernels.panels import PanelTensor
from llmjax.kernels.qtensor import QTensor
from llmjax.kernels.quantized_linear import QUANTIZED_LINEAR


def linear(
    x: jax.Array,
    weight: jax.Array | QTensor | PanelTensor | Adapted,
    bias: jax.Array | None = None,
    used: jax.Array | None = None,
) -> jax.Array:
    """``x @ weight.T + bias`` with f32 accumulation.

    Args:
        x: [T, in]; rounded to the weight's dtype, or less than that.
        weight: [out, in]; with adapters, the product is that of each row's own.
        bias: [out] or None.
        used: i32 [], rows of x that somebody looks at, the first ones; what the others give is anything. None: all.

    Returns:
        [T, out] in x's dtype.
    """
    if isinstance(weight, Adapted):
        out = changed(_product(x, weight.weight, None, used).astype(jnp.float32), x, weight, used)
        out = out if bias is None else out + bias.astype(jnp.float32)
    else:
        out = _product(x, weight, bias, used)
    return out.astype(x.dtype)


def _product(
    x: jax.Array, weight: jax.Array | QTensor | PanelTensor, bias: jax.Array | None, used: jax.Array | None
) -> jax.Array:
    match weight:
        case QTensor():
            operation = QUANTIZED_LINEAR
        case PanelTensor():
            operation = PANEL_LINEAR
        case _:
            operation = LINEAR
    out: jax.Array = operation(x, weight, bias, used)
    return out


def take_rows(weight: jax.Array | QTensor | Adapted, rows: jax.Array) -> jax.Array:
    """Rows of a matrix, as embeddings are looked up.

    Args:
        weight: [V, D].
        rows: i32 [T]; numbers outside the matrix (padding) read some row.

    Returns:
        [T, D] in the weight's dtype; f32 where adapters change them.
    """
    if isinstance(weight, Adapted):
        return changed_rows(take_rows(weight.weight, rows), rows, weight)
    if isinstance(weight, QTensor):
        return weight.take(rows).astype(weight.dtype)
    return weight.at[rows].get(mode="clip", wrap_negative_indices=False)
