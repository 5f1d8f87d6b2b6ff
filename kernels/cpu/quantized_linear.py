"""Products with quantised matrices in C++ (``src/quantized.cc``)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels.cpu.library import Library
from kernels.qtensor import CPU_TILE, NUMBER_BITS, QTensor, RowFormat

# In the order of the enumerations in src/quantized.h.
METHODS = ("float vectors", "int8 vectors", "int8 tiles", "bf16 tiles")
KINDS = ("uint", "int", "e4m3", "e5m2")
NUMBERS = tuple(NUMBER_BITS)

MAX_LEVELS = 16


def refuses(weight: QTensor) -> str | None:
    """Why the kernel does not take a weight; None: it does. Whether it is the fastest is not asked."""
    if weight.words.ndim != 3:
        return "a stack of matrices"
    if weight.tile != CPU_TILE:
        return f"rows are interleaved by {weight.tile}, not {CPU_TILE}"
    return None


def quantized_linears(
    x: jax.Array,
    weights: Sequence[QTensor],
    biases: Sequence[jax.Array | None],
    *,
    library: Library,
    isa: str | None = None,
    method: str | None = None,
) -> tuple[jax.Array, ...]:
    """``x @ weight.T + bias`` in f32 for each weight, in one call.

    Weights whose activations are ``int8`` may have x rounded: by blocks of 32 columns (64 where the groups of all
    weights are multiples of it) to ``scale * integer`` with ``scale = max |x| / 127``. With tiles, and where their
    dtype or activations allow it, x and the dequantised weights may instead be rounded to bf16. All sums are f32.

    Args:
        x: [T, in].
        weights: single matrices [out, in] with `CPU_TILE` rows to a tile; the order of columns, the dtype and the
            activations are the same in all.
        biases: [out] or None for each.
        isa: an instruction set of the library; None: the best that the machine has.
        method: one of METHODS; None: the fastest.

    Returns:
        f32 [T, out] for each weight.
    """
    first = weights[0]
    x = x.astype(jnp.float32)
    if first.columns is not None:
        x = x[:, first.columns]
    int8 = first.activations == "int8"
    call = jax.ffi.ffi_call(
        "llmjax_quantized_linear",
        tuple(jax.ShapeDtypeStruct((x.shape[0], weight.size_out), jnp.float32) for weight in weights),
    )
    arguments = []
    for weight, bias in zip(weights, biases, strict=True):
        arguments += [weight.words, jnp.zeros(0, jnp.float32) if bias is None else bias.astype(jnp.float32)]
    out: tuple[jax.Array, ...] = call(
        x,
        *arguments,
        formats=np.array([number for weight in weights for number in _numbers(weight.format)], np.int32),
        levels=np.array([level for weight in weights for level in _levels(weight.format)], np.float32),
        int8=int8,
        bf16=int8 or first.dtype == jnp.bfloat16,
        method=np.int32(-1 if method is None else METHODS.index(method)),
        isa=np.int32(library.index(isa)),
    )
    return tuple(out)


def _numbers(form: RowFormat) -> list[int]:
    """What `read_format` in src/quantized.cc takes."""

    def run(name: str) -> list[int]:
        found = form.fields.get(name)
        return [0, 0, 0] if found is None else [NUMBERS.index(found.number), found.start, found.count]

    codes = form.codes
    sizes = [form.size_in, form.num_words, codes.bits, KINDS.index(codes.kind), len(codes.levels)]
    sizes += [form.group_size, form.super_size]
    runs = [number for name in ("scales", "zeros", "minima", "super_scales") for number in run(name)]
    return [*sizes, *runs, *run("super_minima")[1:]]


def _levels(form: RowFormat) -> list[float]:
    """The levels, filled up with zeros, then the zero point."""
    levels = form.codes.levels
    zero = 0.0 if isinstance(form.zero, str) else float(form.zero)
    return [*levels, *[0.0] * (MAX_LEVELS - len(levels)), zero]
