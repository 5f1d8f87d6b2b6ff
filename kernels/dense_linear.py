"""Products with plain matrices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.cpu import linear as cpu
from llmjax.kernels.cpu import matrices
from llmjax.kernels.cpu.library import library
from llmjax.kernels.panels import PanelTensor
from llmjax.kernels.registry import Implementation, Operation

NARROW_ROWS = 64  # from which on results in f32 cost a card more memory traffic than time that conversions hide
CPU_MIN_ROWS = 4  # XLA's CPU dot of bfloat16 is a scalar loop for one row and a matrix product from a few rows on


def linear_by_xla(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, used: jax.Array | None = None
) -> jax.Array:
    """``x @ weight.T + bias`` as one dot of XLA's, f32 [T, out].

    Args:
        x: [T, in]; rounded to the weight's dtype, or less than that.
        weight: [out, in], the layout of Hugging Face checkpoints and of XLA's fast CPU dots.
        bias: [out] or None.
        used: not looked at.
    """
    # "highest" keeps f32 products in f32 on devices that would use TF32; narrower types are not affected.
    out = jax.lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((1,), (1,)), ((), ())),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return out if bias is None else out + bias.astype(jnp.float32)


def linear_by_cublas(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, used: jax.Array | None = None
) -> jax.Array:
    """``linear_by_xla`` whose sums, in f32, are stored in x's type, as cuBLAS does: XLA's conversion after a product
    of many rows is a kernel of its own, which reads and writes them once more."""
    out = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)
    return out.astype(jnp.float32)


def _cublas_refuses(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *_: jax.Array | None) -> str | None:
    if x.dtype != weight.dtype or x.dtype.itemsize != 2:
        return f"activations are {x.dtype}, weights {weight.dtype}"
    if bias is not None:
        return "a bias is added in f32"
    return None if x.shape[0] >= NARROW_ROWS else f"only {NARROW_ROWS} rows and more gain"


def linear_by_padding(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, used: jax.Array | None = None
) -> jax.Array:
    """``linear_by_xla`` of so few rows that XLA on a CPU would fall back to a scalar loop."""
    padded = jnp.pad(x, ((0, CPU_MIN_ROWS - len(x)), (0, 0)))
    return linear_by_xla(padded, weight, bias)[: len(x)]


def _padded_refuses(x: jax.Array, weight: jax.Array, *_: jax.Array | None) -> str | None:
    if weight.dtype.itemsize == 2 and x.shape[0] < CPU_MIN_ROWS:
        return None
    return "only one to three rows of 16-bit weights gain"


def _native(x: jax.Array, weight: jax.Array, bias: jax.Array | None, used: jax.Array | None = None) -> jax.Array:
    return cpu.linear(x, weight, bias, used=used)


def _native_refuses(x: jax.Array, weight: jax.Array, *_: jax.Array | None) -> str | None:
    if reason := matrices.refuses(weight):
        return reason
    native = library()
    return "not built" if native is None else matrices.slow(x.shape[0], weight, native)


def _by_panels(
    x: jax.Array, weight: PanelTensor, bias: jax.Array | None = None, used: jax.Array | None = None
) -> jax.Array:
    return cpu.linear(x, weight, bias, used=used)


def _panels_refuse(x: jax.Array, weight: PanelTensor, *_: jax.Array | None) -> str | None:
    return matrices.refuses(weight)


def _by_rows(
    x: jax.Array, weight: PanelTensor, bias: jax.Array | None = None, used: jax.Array | None = None
) -> jax.Array:
    out: jax.Array = LINEAR(x, weight.rows, bias, used)
    return out


# Positional: x, weight, bias, used (as in `linear`; may be left out); f32 [T, out], maybe rounded to x's type.
LINEAR = Operation(
    "linear",
    (
        Implementation("C++", _native, platform="cpu", refuses=_native_refuses),
        Implementation("XLA, padded", linear_by_padding, platform="cpu", refuses=_padded_refuses),
        Implementation("cuBLAS", linear_by_cublas, platform="cuda", refuses=_cublas_refuses),
        Implementation("XLA", linear_by_xla),
    ),
)

# The same with a matrix in panels.
PANEL_LINEAR = Operation(
    "linear in panels",
    (
        Implementation("C++", _by_panels, platform="cpu", refuses=_panels_refuse),
        Implementation("by its rows", _by_rows),
    ),
)
