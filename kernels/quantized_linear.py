"""Products with quantized matrices."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from llmjax.kernels.cpu import linear as cpu
from llmjax.kernels.cpu import matrices
from llmjax.kernels.cpu.library import library
from llmjax.kernels.dense_linear import LINEAR
from llmjax.kernels.qtensor import QTensor, decode
from llmjax.kernels.registry import Implementation, Operation, later

CUDA = "llmjax.kernels.cuda.quantized_linear"  # Pallas is a tenth of what a start would import

BLOCK = 1 << 22  # weights that the portable product dequantizes at a time
CARD_BLOCK = 1 << 27  # on a card, which smaller products do not fill: all but the largest matrices whole


def linear_by_dequantizing(
    x: jax.Array,
    weight: QTensor,
    bias: jax.Array | None = None,
    used: jax.Array | None = None,
    *,
    block_size: int = BLOCK,
) -> jax.Array:
    """``x @ weight.T + bias``, f32 [T, out], a block of rows at a time: memory stays bounded whatever the matrix.

    Args:
        x: [T, in].
        weight: a single matrix [out, in]; its products are those of its dequantized rows in its dtype.
        bias: [out] or None.
        used: not looked at.
        block_size: weights that are dequantized at a time, at most, but for those of a tile of rows.
    """
    form = weight.format
    if weight.columns is not None:
        x = x[:, weight.columns]
    tiles, num_words, tile = weight.words.shape
    step = min(tiles, max(1, block_size // (tile * form.size_in)))

    def block(first: jax.Array | int) -> jax.Array:
        words = jax.lax.dynamic_slice_in_dim(weight.words, first, step)
        records = jnp.swapaxes(words, 1, 2).reshape(step * tile, num_words)
        out: jax.Array = LINEAR(x, decode(records, form).astype(weight.dtype), None)
        return out

    if step == tiles:
        out = block(0)
    else:
        # The last block overlaps the one before it.
        def put(i: jax.Array, out: jax.Array) -> jax.Array:
            first = jnp.minimum(i * step, tiles - step)
            return jax.lax.dynamic_update_slice_in_dim(out, block(first), first * tile, axis=1)

        out = jax.lax.fori_loop(0, -(-tiles // step), put, jnp.zeros((len(x), tiles * tile), jnp.float32))
    out = out[:, : weight.size_out]
    return out if bias is None else out + bias.astype(jnp.float32)


def linear_by_copy(
    x: jax.Array, weight: QTensor, bias: jax.Array | None = None, used: jax.Array | None = None
) -> jax.Array:
    """What `linear_by_dequantizing` gives, with the copy of the matrix that was kept.

    Args:
        used: not looked at.
    """
    out: jax.Array = LINEAR(x, weight.copy, None)
    return out if bias is None else out + bias.astype(jnp.float32)


def _native(x: jax.Array, weight: QTensor, bias: jax.Array | None, used: jax.Array | None = None) -> jax.Array:
    return cpu.linear(x, weight, bias, used=used)


def _native_refuses(x: jax.Array, weight: QTensor, *_: jax.Array | None) -> str | None:
    return matrices.refuses(weight) or (None if library() is not None else "not built")


# Positional: x, weight, bias, used (as in `linear`; may be left out); f32 [T, out].
QUANTIZED_LINEAR = Operation(
    "quantized linear",
    (
        Implementation("C++", _native, platform="cpu", refuses=_native_refuses),
        Implementation("XLA, a copy in 16 bits", linear_by_copy, platform="cuda", refuses=later(CUDA, "copy_refuses")),
        Implementation("Pallas", later(CUDA, "quantized_linear"), platform="cuda", refuses=later(CUDA, "refuses")),
        Implementation(
            "XLA, 8-bit floats",
            later(CUDA, "linear_by_float8"),
            platform="cuda",
            refuses=later(CUDA, "float8_refuses"),
        ),
        Implementation(
            "XLA, dequantizing once", partial(linear_by_dequantizing, block_size=CARD_BLOCK), platform="cuda"
        ),
        Implementation("XLA, dequantizing", linear_by_dequantizing),
    ),
)
