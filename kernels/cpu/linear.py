"""Products of rows with matrices in C++ (``src/linear.cc``)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from llmjax.kernels.cpu import matrices
from llmjax.kernels.cpu.matrices import Matrix
from llmjax.kernels.qtensor import QTensor


def linears(
    x: jax.Array,
    weights: Sequence[Matrix],
    biases: Sequence[jax.Array | None],
    *,
    used: jax.Array | None = None,
    method: str | None = None,
) -> tuple[jax.Array, ...]:
    """``x @ weight.T + bias`` in f32 for each weight, in one call.

    With plain matrices x is not rounded to their type, but to 16 bits of mantissa where tiles multiply, and from 9 rows
    on to bf16 beside matrices of bf16 where vectors multiply that (AVX-512 BF16), and always beside matrices in panels.
    Quantized ones whose activations are ``int8`` may have x rounded: by blocks of 32 columns (64 where the groups of
    all weights are multiples of it) to ``scale * integer`` with ``scale = max |x| / 127``. Where their dtype or
    activations allow it, x and the dequantized weights may instead be rounded to bf16, or x to int16, by the same
    blocks with ``scale = max |x| / 32767``. All sums are f32, or exact integers within a block.

    Args:
        x: [T, in].
        weights: f32, bf16 or f16 [out, in], matrices in panels, or single quantized ones with `CPU_TILE` rows to a
            tile; the order of columns is the same in all.
        biases: [out] or None for each.
        used: i32 [], rows of x that are looked at, the first ones; the others come out as zeros. None: all.
        method: one of `matrices.METHODS` for quantized weights; None: the fastest.

    Returns:
        f32 [T, out] for each weight.
    """
    first = weights[0]
    x = x.astype(jnp.float32)
    if isinstance(first, QTensor) and first.columns is not None:
        x = x[:, first.columns]
    results = tuple(jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32) for weight in weights)
    call = jax.ffi.ffi_call("llmjax_linears", results)
    out: tuple[jax.Array, ...] = call(
        x,
        matrices.rows_in_use(used),
        *matrices.buffers(weights, biases),
        **matrices.attributes(weights, method=method),
    )
    return tuple(out)


def linear(
    x: jax.Array,
    weight: Matrix,
    bias: jax.Array | None = None,
    *,
    used: jax.Array | None = None,
    method: str | None = None,
) -> jax.Array:
    """``linears`` with one weight."""
    return linears(x, [weight], [bias], used=used, method=method)[0]
