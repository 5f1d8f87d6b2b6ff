"""Storing the keys and values of a step's tokens in their pages: quantized and written by one kernel, in place.

XLA needs a kernel for the largest magnitudes, one for the codes and one for the scales of one-byte types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention.types import KVLayout, KVPages, RaggedBatch
from llmjax.kernels.cuda import mosaic_kv_write
from llmjax.kernels.cuda.lowering import Launch, has_triton, launch, load, power_of_2, program_id, store
from llmjax.kernels.cuda.pages import ROUNDER, Columns, PageReader, first_page
from llmjax.kernels.cuda.tuned import Key, tuned

TOKENS = 8  # that a program stores
FLOAT8 = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15)}  # bits of the mantissa, bias of the exponent
NAN = 0x7F  # in both
MANTISSA, BIAS = 23, 127  # of f32


@dataclass(frozen=True)
class Storing:
    """How it is done.

    Args:
        tokens: tokens that a program stores; a power of two.
        mosaic: 1: `mosaic_kv_write` does it, where it takes the arguments; tokens then mean nothing.
    """

    tokens: int
    mosaic: int = 0

    @classmethod
    def of(cls, tokens: int) -> Storing:
        """The choice for a step's number of tokens."""
        return cls(min(TOKENS, power_of_2(tokens)), mosaic=int(not has_triton()))

    @staticmethod
    def key(k: jax.Array, pages: KVPages) -> Key:
        """What the table of a card knows it by."""
        return Key.of("store", PageReader.of(pages, k).name, *k.shape[:2])


def write_kv(
    pages: KVPages,
    k: jax.Array,
    v: jax.Array | None,
    batch: RaggedBatch,
    *,
    storing: Storing | None = None,
    interpret: bool = False,
) -> KVPages:
    """Stores each token's K and V at its place. Tokens that share a place (padding, on the dummy page) may mix there.

    Args:
        k, v: [T, K, h]; v None for latent pages.
        batch: says where.
        storing: how; None: as was measured, or `Storing.of` says.
        interpret: run the kernel as XLA operations, on any device.
    """
    tokens, kv_heads, head_dim = k.shape
    if storing is None:
        storing = tuned(Storing.of(tokens), Storing.key(k, pages))
    if storing.mosaic and not mosaic_kv_write.refuses(k, pages):
        return mosaic_kv_write.write_kv(pages, k, v, batch, interpret=interpret)
    block = storing.tokens
    parts = [k] if v is None else [k, v]
    calibration = batch.kv_index if pages.calibration is None else pages.calibration  # what is not there is not read
    kernel = _Kernel(pages.layout, head_dim, tokens, block, pages.calibration is not None)
    (data,) = launch(
        kernel.write,
        [jax.ShapeDtypeStruct(pages.data.shape, pages.data.dtype)],
        [pages.data, batch.kv_index, first_page(batch), calibration, *parts],
        Launch((-(-tokens // block), kv_heads), interpret=interpret),
        in_place={0: 0},
    )
    return pages.with_data(data)


def float8_bits(x: jax.Array, kind: str) -> jax.Array:
    """f32 within the range of an 8-bit float type, or NaN, as its bits, u8, to nearest even: cards before Ada cannot
    convert."""
    mantissa, bias = FLOAT8[kind]
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    dropped = MANTISSA - mantissa
    nearest = size + np.uint32((1 << (dropped - 1)) - 1) + (size >> dropped & np.uint32(1))
    normal = (nearest >> dropped) - np.uint32((BIAS - bias) << mantissa)
    # Adding a number whose last bit is worth one code rounds what is below the normal numbers.
    one = np.float32(2.0 ** (1 - bias - mantissa + MANTISSA))
    sum_bits = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(size, jnp.float32) + one, jnp.uint32)
    small = sum_bits - one.view(np.uint32)
    least = np.uint32((1 - bias + BIAS) << MANTISSA)
    code = jnp.where(x != x, np.uint32(NAN), jnp.where(size < least, small, normal))
    return (code | (bits >> 24 & np.uint32(0x80))).astype(jnp.uint8)


@dataclass(frozen=True)
class _Kernel:
    layout: KVLayout
    head_dim: int
    tokens: int
    block: int
    calibrated: bool

    def write(self, _: Any, kv_index: Any, first_page: Any, calibration: Any, *refs: Any) -> None:
        """refs: keys and values, and the result: data [N, parts, K, layout.rows(h), h]."""
        layout, data = self.layout, refs[-1]
        token = program_id(0) * self.block + jnp.arange(self.block, dtype=jnp.int32)
        head, inside = program_id(1), token < self.tokens
        place = load(kv_index, (token,), inside)
        page, offset = (f(place, np.int32(layout.page_size)) for f in (jax.lax.div, jax.lax.rem))
        page = load(first_page, (np.int32(0),)) + page
        column = Columns.of(0, self.head_dim)
        where = inside[:, None] & column.inside[None]
        for part, ref in enumerate(refs[:-1]):
            x, scales = load(ref, (token[:, None], head, column.index[None]), where), None
            if layout.dtype.itemsize == 1:
                lines = None
                if self.calibrated:
                    lines = tuple(load(calibration, (np.int32(part), np.int32(i))) for i in range(2))
                x, scales = layout.scaled(x.astype(jnp.float32), lines)
            index = (page[:, None], np.int32(part), head, offset[:, None], column.index[None])
            store(data, index, self._stored(x), where)
            if scales is not None:
                self._store_scales(data, (page, part, head, offset), scales, inside)

    def _store_scales(self, data: Any, at: tuple[Any, ...], scales: jax.Array, inside: jax.Array) -> None:
        """The four bytes of each token's scale, after the values of its record."""
        page, part, head, offset = at
        number = jnp.arange(4, dtype=jnp.int32)
        byte = 4 * offset[:, None] + number
        row = self.layout.page_size + jax.lax.div(byte, np.int32(self.head_dim))
        index = (page[:, None], np.int32(part), head, row, jax.lax.rem(byte, np.int32(self.head_dim)))
        bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)[:, None] >> (8 * number).astype(jnp.uint32)
        store(data, index, (bits & np.uint32(0xFF)).astype(jnp.uint8), jnp.broadcast_to(inside[:, None], byte.shape))

    def _stored(self, x: jax.Array) -> jax.Array:
        name = self.layout.dtype.name
        if name == "int8":
            bits = jax.lax.bitcast_convert_type(x + ROUNDER, jnp.uint32)
            return (bits & np.uint32(0xFF)).astype(jnp.uint8)
        return float8_bits(x, name) if name in FLOAT8 else x.astype(self.layout.dtype)
