"""How weight matrices, plain or quantized, are passed to the library (``MatrixArguments`` in ``src/products.h``)."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.adapted import Adapted
from llmjax.kernels.choices import BY_XLA, NATIVE, ROWS, TABLE, Choice, choice_of
from llmjax.kernels.cpu.library import Library, library
from llmjax.kernels.panels import PanelTensor
from llmjax.kernels.qtensor import CPU_TILE, INT8_VECTORS, QTensor
from llmjax.kernels.row_format import NUMBER_BITS, RowFormat

# In the order of the enumerations in src/quantized.h, whose further methods take matrices in panels alone.
METHODS = ("float vectors", "float panels", "int8 vectors", "bf16 panels", "bf16 tiles", "int16 panels", "int8 tiles")
KINDS = ("uint", "int", "e4m3", "e5m2")
NUMBERS = tuple(NUMBER_BITS)

FORMAT_NUMBERS = 21
MAX_LEVELS = 16
MAX_CHOICES = len(ROWS)
LANES = 8  # what sizes of plain matrices are multiples of, but for tiles
MAX_EXACT_ROWS = 16  # of x that are not rounded to bf16 beside plain matrices in tiles, as in products.cc

# The table for plain matrices where nothing was measured. Where vectors multiply bf16, products of more rows with
# matrices of bf16 are faster by XLA's dot, which rounds x to bf16 (benchmarks/kernels.py prints both).
MAX_ROWS = MappingProxyType({"avx512bf16": 128})
MAX_WIDE_ROWS = 128  # with matrices of f32, with which XLA's dot is faster for more

WITHOUT_PANELS = ("generic", "dotprod", "i8mm")  # of which nothing multiplies matrices in panels

Matrix: TypeAlias = jax.Array | QTensor | PanelTensor


def takes_panels(native: Library) -> bool:
    """Whether the library multiplies matrices in panels with the instruction set that calls get."""
    return native.best not in WITHOUT_PANELS


def refuses(weight: jax.Array | QTensor | PanelTensor | Adapted, rows: int = 1) -> str | None:
    """Why the library does not take a weight; None: it does. Whether it is the fastest is not asked.

    Args:
        rows: how many rows x has, at least.
    """
    if isinstance(weight, Adapted):
        return "adapters change it"
    if isinstance(weight, PanelTensor):
        native = library()
        return None if native is not None and takes_panels(native) else "this instruction set does not take panels"
    if not isinstance(weight, QTensor):
        if weight.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return f"weights are {weight.dtype}"
        native = library()
        tiles = native is not None and native.best == "amx" and weight.dtype == jnp.bfloat16 and rows > MAX_EXACT_ROWS
        multiple = 2 if tiles else LANES
        return f"{weight.shape[1]} inputs are not a multiple of {multiple}" if weight.shape[1] % multiple else None
    if weight.words.ndim != 3:
        return "a stack of matrices"
    if weight.tile != CPU_TILE:
        return f"rows are interleaved by {weight.tile}, not {CPU_TILE}"
    return None


def slow(rows: int, weight: jax.Array | jax.ShapeDtypeStruct | QTensor | PanelTensor, library: Library) -> str | None:
    """Why something else is faster with ``rows`` rows of x, as measured or else by the table; None: the library is."""
    if isinstance(weight, QTensor | PanelTensor):
        return None
    if (choice := choice_of(weight)) is not None:
        return None if choice.method(rows) == NATIVE else f"measured to be slower with {rows} rows"
    if weight.dtype == jnp.float32:
        most = MAX_WIDE_ROWS
    elif weight.dtype == jnp.bfloat16 and library.best in MAX_ROWS:
        most = MAX_ROWS[library.best]
    else:
        return None
    return None if rows <= most else f"slower from {most + 1} rows on"


def tabled(rows: int, weight: jax.Array | jax.ShapeDtypeStruct | QTensor, library: Library) -> str:
    """The method of the table, as `choices` names it."""
    if isinstance(weight, QTensor):
        return TABLE
    return NATIVE if slow(rows, weight, library) is None else BY_XLA


def candidates(weight: jax.Array | QTensor, library: Library) -> tuple[str, ...]:
    """The methods of which the fastest may be taken for each number of rows; one or none: there is nothing to choose.

    Where tokens are promised to be the same in any batch (int8 activations but for AMX's tiles, see
    docs/quality.md), that is one method, whose sums do not depend on the rows. Float activations are never rounded to
    bf16 by panels of vectors where int16 panels can multiply the codes: those keep 15 bits of x, bf16 8.
    """
    tiles = library.best == "amx"
    if not isinstance(weight, QTensor):
        return (NATIVE, BY_XLA) if refuses(weight) is None and weight.dtype != jnp.float16 else ()
    floats = weight.format.codes.kind in ("e4m3", "e5m2")
    if weight.activations == INT8_VECTORS or (weight.activations == "int8" and not floats and not tiles):
        return ("int8 vectors",)
    if weight.activations == "int8" and not floats:
        return (TABLE, "int8 vectors", "bf16 tiles", "int8 tiles")
    half = (TABLE, "float vectors", "float panels", "int16 panels", "bf16 panels", "bf16 tiles")
    return half if weight.dtype == jnp.bfloat16 else half[:3]


def buffers(weights: Sequence[Matrix], biases: Sequence[jax.Array | None]) -> list[jax.Array]:
    """The arguments of a call that hold weights and biases."""
    arrays: list[jax.Array] = []
    for weight, bias in zip(weights, biases, strict=True):
        match weight:
            case QTensor():
                arrays.append(weight.words)
            case PanelTensor():
                arrays.append(weight.panels)
            case _:
                arrays.append(weight)
        arrays.append(jnp.zeros(0, jnp.float32) if bias is None else bias.astype(jnp.float32))
    return arrays


def rows_in_use(used: jax.Array | None) -> jax.Array:
    """The argument of a call that says how many rows are looked at; None: all."""
    return jnp.zeros(0, jnp.int32) if used is None else used.astype(jnp.int32)[None]


def attributes(weights: Sequence[Matrix], *, method: str | None = None) -> dict[str, Any]:
    """The attributes of a call that describe the weights.

    Args:
        method: one of METHODS for the quantized ones; None: the one that was measured to be the fastest, or else the
            table's.
    """
    numbers, levels = [], []
    for weight in weights:
        if isinstance(weight, QTensor):
            alone = weight.activations == INT8_VECTORS
            int8 = alone or weight.activations == "int8"
            half = not alone and (int8 or weight.dtype == jnp.bfloat16)
            numbers += [-1 if method is None else METHODS.index(method), int8, half]
            numbers += _format_numbers(weight.format)
            numbers += _choices(choice_of(weight))
            levels += _levels(weight.format)
        else:
            numbers += [0] * (3 + FORMAT_NUMBERS + 2 * MAX_CHOICES)
            levels += [0.0] * (MAX_LEVELS + 1)
    return {"matrices": np.array(numbers, np.int32), "levels": np.array(levels, np.float32)}


def _format_numbers(form: RowFormat) -> list[int]:
    """What `read_format` in src/products.cc takes."""

    def run(name: str) -> list[int]:
        field = form.fields.get(name)
        return [0, 0, 0] if field is None else [NUMBERS.index(field.number), field.start, field.count]

    codes = form.codes
    sizes = [form.size_in, form.num_words, codes.bits, KINDS.index(codes.kind), len(codes.levels)]
    sizes += [form.group_size, form.super_size]
    runs = [number for name in ("scales", "zeros", "minima", "super_scales") for number in run(name)]
    return [*sizes, *runs, *run("super_minima")[1:]]


def _choices(choice: Choice | None) -> list[int]:
    """Pairs of rows and a method (-1: the table's), filled up with zeros."""
    steps = () if choice is None else choice.steps
    pairs = [number for rows, name in steps for number in (rows, -1 if name == TABLE else METHODS.index(name))]
    return pairs + [0] * (2 * MAX_CHOICES - len(pairs))


def _levels(form: RowFormat) -> list[float]:
    """The levels, filled up with zeros, then the zero point."""
    levels = form.codes.levels
    zero = 0.0 if isinstance(form.zero, str) else float(form.zero)
    return [*levels, *[0.0] * (MAX_LEVELS - len(levels)), zero]
