"""Quantized matrices on a device, packed row by row as `row_format` has it, and what their values are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.row_format import CHUNK, FLOAT8, NUMBER_BITS, PLANES, Field, RowFormat

CPU_TILE = 16  # rows that the C++ kernels multiply side by side
CUDA_TILE = 32  # rows whose words are a cache line

INT8_DECODES = "int8 decodes"
"""For `QTensor.activations`: ``int8`` in steps that take one token of each sequence, ``float`` in all others."""
INT8_VECTORS = "int8 vectors"
"""For `QTensor.activations`: ``int8`` for every number of rows, in one way, so that no row depends on others."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QTensor:
    """A quantized matrix [out, in], or a stack of them.

    Attributes:
        words: u32 [..., tiles, words of a record, tile]. Rows are dealt out in tiles whose words lie side by side: a
            vector of words holds the same columns of consecutive rows. The last tile is filled up with rows of zeros.
        columns: i32 [in], of a stack [..., in], the logical column of each stored one; None: the same.
        format: how a row is stored.
        size_out: rows.
        dtype: float type that products take dequantized weights in.
        activations: ``float``; ``int8`` where kernels may round x to int8 with a scale for each group of columns;
            ``fp8`` where those of CUDA may round x to E4M3 for weights that are E4M3; or
            `INT8_DECODES`, which kernels take for ``float``, and `rounding_decodes` for ``int8``; or `INT8_VECTORS`.
        copy: the dequantized weights in ``dtype``, [out, in], for products with many rows of x; None: not kept.
    """

    words: jax.Array
    columns: jax.Array | None
    format: RowFormat = field(metadata={"static": True})
    size_out: int = field(metadata={"static": True})
    dtype: jnp.dtype = field(metadata={"static": True})
    activations: str = field(default="float", metadata={"static": True})
    copy: jax.Array | None = None

    @property
    def tile(self) -> int:
        return self.words.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.words.shape[:-3], self.size_out, self.format.size_in)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.words, self.columns, self.copy) if part is not None)

    def dequantize(self) -> jax.Array:
        """The weights, f32 [..., out, in]."""
        records = jnp.swapaxes(self.words, -1, -2)  # [..., tiles, tile, words]
        records = records.reshape(*records.shape[:-3], -1, records.shape[-1])[..., : self.size_out, :]
        return self._decode(records)

    def float8_codes(self) -> jax.Array:
        """The codes of 8-bit floats, in the order of the stored columns and without scales: f8 [..., out, in]."""
        records = jnp.swapaxes(self.words, -1, -2)
        records = records.reshape(*records.shape[:-3], -1, records.shape[-1])[..., : self.size_out, :]
        return jax.lax.bitcast_convert_type(
            _codes(records, self.format).astype(jnp.uint8), FLOAT8[self.format.codes.kind]
        )

    def take(self, rows: jax.Array) -> jax.Array:
        """Some rows of a single matrix, f32 [n, in].

        Args:
            rows: i32 [n]; rows outside the matrix read some row.
        """
        rows = jnp.clip(rows, 0, self.size_out - 1)
        return self._decode(self.words[rows // self.tile, :, rows % self.tile])

    def _decode(self, records: jax.Array) -> jax.Array:
        weights = decode(records, self.format)
        if self.columns is None:
            return weights
        if self.columns.ndim > 1:
            return jnp.take_along_axis(weights, jnp.argsort(self.columns)[..., None, :], axis=-1)
        return jnp.zeros_like(weights).at[..., self.columns].set(weights, unique_indices=True)


def rounding_decodes(weights: Any) -> Any:
    """A tree of weights as a decode step takes them: products with those of `INT8_DECODES` may round x to int8."""

    def with_int8(leaf: Any) -> Any:
        rounds = isinstance(leaf, QTensor) and leaf.activations == INT8_DECODES
        return replace(leaf, activations="int8") if rounds else leaf

    return jax.tree.map(with_int8, weights, is_leaf=lambda leaf: isinstance(leaf, QTensor))


def decode(records: jax.Array, form: RowFormat) -> jax.Array:
    """Dequantizes records: u32 [..., words] to f32 [..., in] in the order of the stored columns."""
    numbers = _numbers(records, form)
    scale, zero, minimum = group_scales(records, form)
    grouped = _in_groups(numbers, form.group_size)
    if zero is not None:
        grouped = grouped - zero[..., None]
    elif form.zero:
        grouped = grouped - jnp.float32(form.zero)
    grouped = grouped * scale[..., None]
    if minimum is not None:
        grouped = grouped - minimum[..., None]
    return grouped.reshape(*grouped.shape[:-2], -1)[..., : form.size_in]


def group_scales(records: jax.Array, form: RowFormat) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Scale, zero point and minimum of each group, f32 [..., groups]; None: not in the record."""
    numbers = {name: _read_field(records, entry) for name, entry in form.fields.items()}

    def whole(name: str) -> jax.Array | None:
        value, above = numbers.get(name), numbers.get(f"super_{name}")
        if value is None or above is None:
            return value
        by_super = _in_groups(value, form.super_size // form.group_size) * above[..., None]
        return by_super.reshape(*by_super.shape[:-2], -1)[..., : form.num_groups]

    scale = whole("scales")
    assert scale is not None
    return scale, numbers.get("zeros"), whole("minima")


def _in_groups(values: jax.Array, size: int) -> jax.Array:
    """[..., n] to [..., groups, size], the last group filled up with zeros."""
    missing = -values.shape[-1] % size
    padded = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)]) if missing else values
    return padded.reshape(*values.shape[:-1], -1, size)


def _codes(records: jax.Array, form: RowFormat) -> jax.Array:
    """The codes, u32 [..., in]."""
    bits = form.codes.bits
    words = records[..., : form.num_chunks * bits].reshape(*records.shape[:-1], form.num_chunks, bits)
    codes, low = jnp.zeros((*words.shape[:-1], CHUNK), jnp.uint32), 0
    for width in PLANES[bits]:
        pieces, columns = np.ogrid[: 8 // width, :4]
        shifts = (width * pieces + 8 * columns).astype(np.uint32)[:, None]  # [pieces, 1, bytes]
        plane = words[..., None, low : low + width, None] >> shifts & ((1 << width) - 1)
        codes = codes | plane.reshape(codes.shape) << low
        low += width
    return codes.reshape(*records.shape[:-1], -1)[..., : form.size_in]


def _numbers(records: jax.Array, form: RowFormat) -> jax.Array:
    """What the codes stand for, f32 [..., in]."""
    codes, kind = _codes(records, form), form.codes.kind
    if kind in FLOAT8:
        return jax.lax.bitcast_convert_type(codes.astype(jnp.uint8), FLOAT8[kind]).astype(jnp.float32)
    if kind == "int":
        return (codes.astype(jnp.int32) << 24 >> 24).astype(jnp.float32)
    return _levels(codes, form.codes.levels) if form.codes.levels else codes.astype(jnp.int32).astype(jnp.float32)


def _levels(codes: jax.Array, levels: tuple[float, ...]) -> jax.Array:
    """A table of up to 16 entries as a tree of selections: gathers are slow wherever vectors are short."""
    values = [jnp.float32(level) for level in levels]
    bit = 0
    while len(values) > 1:
        odd = (codes >> bit & 1).astype(bool)
        values.append(values[-1])  # the last of an odd number meets itself
        values = [jnp.where(odd, values[i + 1], values[i]) for i in range(0, len(values) - 1, 2)]
        bit += 1
    return values[0]


def _read_field(records: jax.Array, entry: Field) -> jax.Array:
    words = records[..., entry.start : entry.start + entry.num_words]
    width = NUMBER_BITS[entry.number]
    if width == 32:
        return jax.lax.bitcast_convert_type(words, jnp.float32)
    shifts = jnp.arange(0, 32, width, dtype=jnp.uint32)
    values = (words[..., None] >> shifts & ((1 << width) - 1)).reshape(*words.shape[:-1], -1)[..., : entry.count]
    match entry.number:
        case "f16":
            return jax.lax.bitcast_convert_type(values.astype(jnp.uint16), jnp.float16).astype(jnp.float32)
        case "bf16":
            return jax.lax.bitcast_convert_type(values << 16, jnp.float32)
        case "e8m0":  # exponent 0 stands for 2^-127, which is subnormal
            return jax.lax.bitcast_convert_type(jnp.where(values == 0, 1 << 22, values << 23), jnp.float32)
        case "e4m3":
            return jax.lax.bitcast_convert_type(values.astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.float32)
        case "i8" | "i16":
            return (values.astype(jnp.int32) << 32 - width >> 32 - width).astype(jnp.float32)
    return values.astype(jnp.int32).astype(jnp.float32)
