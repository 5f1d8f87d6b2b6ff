"""Reading keys and values from pages inside a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention.types import KVLayout, KVPages, RaggedBatch
from llmjax.kernels.cuda.lowering import MIN_DOT, load, power_of_2

FLOAT8_GAIN = {"float8_e4m3fn": 256.0, "float8_e5m2": 1.0}  # of the halves that they are read as
ROUNDER = np.float32(1.5 * 2**23)  # a small number added to it is rounded, and lies in the lowest bits

MAX_HEAD_DIM = 256
MAX_VALUE_DIM = 512  # of latent pages


def first_page(batch: RaggedBatch) -> jax.Array:
    """``batch.first_page`` as kernels take it, i32 [1]."""
    return jnp.asarray(batch.first_page, jnp.int32).reshape(1)


@dataclass(frozen=True)
class Columns:
    """A run of a key's elements, filled up to a power of two."""

    index: jax.Array  # i32 [D]
    inside: jax.Array  # bool [D]

    @classmethod
    def of(cls, first: int, stop: int) -> Columns:
        index = first + jnp.arange(max(MIN_DOT, power_of_2(stop - first)), dtype=jnp.int32)
        return cls(index, index < stop)


@dataclass(frozen=True)
class Elements:
    """Keys or values of some tokens: ``codes * scale + zero``, the zero point being `PageReader.zero`.

    Codes enter products as they are, without rounding; logits and softmax weights are multiplied with the scales.
    """

    codes: tuple[jax.Array, ...]  # [C, D] for each of `PageReader.columns`, in the type of the products
    scale: jax.Array | None  # f32 [C] or [1]; None: 1


@dataclass(frozen=True)
class PageReader:
    """How keys and values lie, and what they become.

    Args:
        layout: how pages are stored; latent ones have one record, of which values are the first columns.
        head_dim: h.
        calibrated: one-byte types have one scale and zero point for keys and one for values.
        dtype: type that products are computed in.
    """

    layout: KVLayout
    head_dim: int
    calibrated: bool
    dtype: jnp.dtype

    @classmethod
    def of(cls, pages: KVPages, q: jax.Array) -> PageReader:
        """For pages and the queries that meet them: products are as exact as the wider of the two."""
        dtype = jnp.dtype(q.dtype) if pages.dtype.itemsize == 1 else jnp.promote_types(q.dtype, pages.dtype)
        return cls(pages.layout, pages.data.shape[-1], pages.calibration is not None, dtype)

    @property
    def name(self) -> str:
        """A name for what is read, for the tables of cards."""
        size = f"{self.value_dim} + {self.head_dim - self.value_dim}" if self.layout.value_dim else str(self.head_dim)
        scales = ", token scales" if self.layout.token_scales else ""
        return f"{self.layout.dtype.name}{scales}, {size}, pages of {self.layout.page_size}, {self.dtype.name}"

    @property
    def value_dim(self) -> int:
        """Size of a value."""
        return self.layout.value_dim or self.head_dim

    @property
    def padded_dim(self) -> int:
        """D, the size of a value in a kernel."""
        return max(MIN_DOT, power_of_2(self.value_dim))

    @property
    def exact(self) -> bool:
        """Products are in f32, which takes many more registers."""
        return self.dtype.itemsize == 4

    @property
    def block(self) -> int:
        """Keys that a program reads at a time."""
        return 16 if self.exact else 32 if self.padded_dim > 128 else 64

    def columns(self) -> list[Columns]:
        """The columns of a key: first those that a value has too, then the rest."""
        value, size = self.value_dim, self.head_dim
        return [Columns.of(0, value), *([Columns.of(value, size)] if value < size else [])]

    def read(
        self, refs: PageRefs, row: jax.Array, head: jax.Array, key: jax.Array, inside: jax.Array
    ) -> tuple[Elements, Elements]:
        """Keys and values of tokens of a request.

        Args:
            row: row of the page table.
            head: key/value head.
            key: i32 [C], positions of tokens.
            inside: bool [C]; elsewhere nothing is read, and elements are zero.
        """
        size = np.int32(self.layout.page_size)
        page = load(refs.first_page, (np.int32(0),)) + load(refs.table, (row, jax.lax.div(key, size)), inside)
        offset = jax.lax.rem(key, size)
        elements = []
        for part in range(self.layout.parts):
            codes = []
            for column in self.columns():
                index = (page[:, None], np.int32(part), head, offset[:, None], column.index[None])
                codes.append(self._floats(load(refs.data, index, inside[:, None] & column.inside[None])))
            scale = None
            if self.layout.token_scales:
                scale = self._token_scales(refs, page, part, head, offset, inside)
            elif self.calibrated:
                scale = load(refs.calibration, (np.int32(part), jnp.zeros(1, jnp.int32)))
            elements.append(Elements(tuple(codes), self._gain(scale)))
        return elements[0], elements[-1]

    def zeros(self, refs: PageRefs) -> tuple[jax.Array | None, jax.Array | None]:
        """Zero points of keys and of values, f32; None: they have none."""
        if not self.calibrated:
            return None, None
        zero_points = [load(refs.calibration, (np.int32(part), np.int32(1))) for part in range(self.layout.parts)]
        return zero_points[0], zero_points[-1]

    def _token_scales(
        self, refs: PageRefs, page: jax.Array, part: int, head: jax.Array, offset: jax.Array, inside: jax.Array
    ) -> jax.Array:
        """f32 [C], from the four bytes that each token has after the values of its record."""
        byte = 4 * offset[:, None] + jnp.arange(4, dtype=jnp.int32)
        row = self.layout.page_size + jax.lax.div(byte, np.int32(self.head_dim))
        index = (page[:, None], np.int32(part), head, row, jax.lax.rem(byte, np.int32(self.head_dim)))
        stored = load(refs.data, index, jnp.broadcast_to(inside[:, None], byte.shape)).astype(jnp.int32)
        bits = (stored << 8 * jnp.arange(4, dtype=jnp.int32)).sum(-1)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def _gain(self, scale: jax.Array | None) -> jax.Array | None:
        gain = FLOAT8_GAIN.get(self.layout.dtype.name, 1.0)
        if gain == 1:
            return scale
        return scale * gain if scale is not None else jnp.full(1, gain, jnp.float32)

    def _floats(self, codes: jax.Array) -> jax.Array:
        """Stored elements as the type of the products, 8-bit floats up to FLOAT8_GAIN; exact."""
        match self.layout.dtype.name:
            case "int8":
                return jax.lax.bitcast_convert_type(codes, jnp.int8).astype(self.dtype)
            case "float8_e4m3fn":  # a half with another width of exponent, and halves are converted on every card
                bits = codes.astype(jnp.uint16)
                bits = (bits & 0x80) << 8 | (bits & 0x7F) << 7
                return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(self.dtype)
            case "float8_e5m2":
                return jax.lax.bitcast_convert_type(codes.astype(jnp.uint16) << 8, jnp.float16).astype(self.dtype)
        return codes.astype(self.dtype)


@dataclass(frozen=True)
class PageRefs:
    """References to what pages consist of."""

    data: Any  # [N, layout.parts, K, layout.rows(h), h]
    table: Any  # i32 [R, P]
    first_page: Any  # i32 [1], as `first_page` has it
    calibration: Any  # f32 [layout.parts, 2]; anything if there is none
