"""``linear``: the one function through which every weight matrix is applied; it dispatches on the weight's type."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """``x @ weight.T + bias`` with f32 accumulation.

    Args:
        x: [T, in].
        weight: [out, in], the layout of Hugging Face checkpoints and of XLA's fast CPU dots.
        bias: [out] or None.

    Returns:
        [T, out] in x's dtype.
    """
    out = jax.lax.dot_general(
        x.astype(weight.dtype), weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)
