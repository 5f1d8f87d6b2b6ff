"""The nouns of paged attention. Letters: T tokens, R requests, P pages a request, N pages, H query heads, K key/value
heads, h head size."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from llmjax.kernels.zeros import zeros

# Up to the second number of bytes Pallas computes 32-bit offsets of elements. In arrays of one-byte types they reach no
# further than the first.
INT32_BYTES = (1 << 31, 1 << 32)
LEAST_AMAX = 1e-30  # a row of zeros still has a normal scale: some devices flush subnormals


@dataclass(frozen=True)
class KVLayout:
    """How the pages of a layer are stored.

    The record of a head in a page is ``page_size`` rows of ``h`` elements, one a token. One-byte types with a scale a
    token and head have the scales after them: ``page_size`` f32 as bytes, in as many further rows as they need. So a
    layer's cache is one array whatever the type (each argument of a dispatch costs the host time).

    Keys and values have a record each; in latent pages (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434)
    there is one record, whose first elements are the value too.

    Args:
        dtype: type of the values.
        page_size: tokens in a page.
        token_scales: each token and head has its scale, computed when it is stored.
        value_dim: the leading elements of a key that are its value; None: values have records of their own.
    """

    dtype: jnp.dtype
    page_size: int
    token_scales: bool
    value_dim: int | None = None

    @classmethod
    def of(
        cls, dtype: jnp.dtype, *, page_size: int, calibrated: bool = False, value_dim: int | None = None
    ) -> KVLayout:
        """The layout of a type: scales in the pages where it is one byte wide and has no calibrated ones."""
        dtype = jnp.dtype(dtype)
        return cls(dtype, page_size, token_scales=dtype.itemsize == 1 and not calibrated, value_dim=value_dim)

    @property
    def parts(self) -> int:
        """Records of a token and head: 2 (key, value), or 1."""
        return 2 if self.value_dim is None else 1

    @property
    def max_value(self) -> float:
        """What a scale maps the largest magnitude to."""
        return 127.0 if self.dtype == jnp.int8 else float(jnp.finfo(self.dtype).max)

    def scaled(
        self, x: jax.Array, calibration: tuple[jax.Array, jax.Array] | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Numbers as one-byte types hold them, but for the rounding, and the scales to store.

        Products with reciprocals and no quotients: XLA turns some divisions into those, and every implementation is to
        store the same bits.

        Args:
            x: f32 [..., h].
            calibration: scale and zero point, which broadcast to x; None: ``token_scales``.

        Returns:
            f32 [..., h] within the type's range, to be rounded to nearest even; and f32 [...] or None.
        """
        scales = None
        if calibration is not None:
            scale, zero = calibration
            x = (x - zero) * (1 / scale)
        else:
            scales = jnp.maximum(jnp.abs(x).max(-1), LEAST_AMAX) * (1 / self.max_value)
            x = x * (1 / scales)[..., None]
        return jnp.clip(x, -self.max_value, self.max_value), scales

    def rows(self, head_dim: int) -> int:
        """Rows of a record."""
        return self.page_size + (-(-4 * self.page_size // head_dim) if self.token_scales else 0)

    def page_bytes(self, *, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of a page of one layer: keys, values and their scales."""
        return self.parts * num_kv_heads * self.rows(head_dim) * head_dim * self.dtype.itemsize


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """The pages of a layer, or of several, one layer after another (`RaggedBatch.first_page`). A layer's page 0 is its
    dummy page: padding reads and writes it, nobody owns it.

    ``data`` holds the layout's type; as bits in uint8 where that is one byte wide, and in uint16 where it is two bytes
    wide and XLA cannot index such floats in place (CPU: it would widen the whole array at every access). Four of one
    byte may be a word, in uint32, the first in its low bits: not every device can store single bytes.
    """

    data: jax.Array  # [N, layout.parts (keys, values), K, layout.rows(h), h, or words of h]
    calibration: jax.Array | None  # f32 [layout.parts, 2 (scale, zero point)] of one-byte types; None: not given
    layout: KVLayout = field(metadata={"static": True})

    @property
    def num_pages(self) -> int:
        """Pages of all layers."""
        return len(self.data)

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the values."""
        return self.layout.dtype

    @property
    def in_words(self) -> bool:
        """Whether four bytes are a word."""
        return bool(self.data.dtype.itemsize == 4 * self.dtype.itemsize)

    @property
    def head_dim(self) -> int:
        """Size of a key."""
        return int(self.data.shape[-1]) * (4 if self.in_words else 1)

    @property
    def value_dim(self) -> int:
        """Size of a value."""
        return self.layout.value_dim or self.head_dim

    def with_data(self, data: jax.Array) -> KVPages:
        return replace(self, data=data)

    def encode(self, k: jax.Array, v: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Keys and values [..., K, h] as elements of ``data`` [..., parts, K, h], and the scales [..., parts, K] to
        store; values are None where pages are latent."""
        assert (v is None) == (self.layout.parts == 1)
        x, scales = jnp.stack([k] if v is None else [k, v], axis=-3), None
        if self.dtype.itemsize == 1:
            calibration = None if self.calibration is None else self.calibration[:, :, None, None]
            lines = None if calibration is None else (calibration[:, 0], calibration[:, 1])
            x, scales = self.layout.scaled(x.astype(jnp.float32), lines)
            x = jnp.round(x) if self.dtype == jnp.int8 else x
        x = x.astype(self.dtype)
        if self.in_words:
            x = x.reshape(*x.shape[:-1], -1, 4)
        bits = x if self.data.dtype == self.dtype else jax.lax.bitcast_convert_type(x, self.data.dtype)
        return bits, scales

    def keys_and_values(self, records: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Records [parts, ..., layout.rows(h), h] as keys and values in f32 [..., page_size, size of each]."""
        x = self.decode(records)
        return x[0], x[-1][..., : self.value_dim]

    def decode(self, records: jax.Array) -> jax.Array:
        """Records [parts, ..., layout.rows(h), h] as f32 [parts, ..., page_size, h]."""
        if self.in_words:
            single = jax.lax.bitcast_convert_type(records, jnp.uint8)
            records = single.reshape(*records.shape[:-1], -1)
        x = records[..., : self.page_size, :]
        x = x if x.dtype == self.dtype else jax.lax.bitcast_convert_type(x, self.dtype)
        x = x.astype(jnp.float32)
        if self.calibration is not None:
            scale, zero = (self.calibration[:, i].reshape(-1, *[1] * (x.ndim - 1)) for i in (0, 1))
            return x * scale + zero
        if self.layout.token_scales:
            rest = records[..., self.page_size :, :]
            tail = rest.reshape(*rest.shape[:-2], -1)[..., : 4 * self.page_size]
            scales = jax.lax.bitcast_convert_type(tail.reshape(*tail.shape[:-1], -1, 4), jnp.float32)
            return x * scales[..., None]
        return x


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """A step's tokens, packed request after request, as the layers of one page group see them.

    Row r owns tokens ``query_start[r] : query_start[r + 1]``; they are the last of its ``kv_len[r]`` tokens. Padding
    rows have ``kv_len == 0`` and no tokens; tokens from ``query_start[R]`` on are padding.
    """

    query_start: jax.Array  # i32 [R + 1]
    kv_len: jax.Array  # i32 [R], this step's tokens included
    page_table: jax.Array  # i32 [R, P]; 0 where a page is not needed (any more)
    kv_index: jax.Array  # i32 [T], page * page_size + offset where each token's K and V go; dummy page for padding
    first_page: jax.Array | int = 0  # i32 [], where the layer's pages begin among those of all layers in the array
    # i32 [T], position of the last key that a query sees, of keys after it those with the same number; None: its own.
    last_key: jax.Array | None = None
    first_key: int = field(default=0, metadata={"static": True})  # position of the first key that a query may see
    end_key: int | None = field(default=None, metadata={"static": True})  # position after the last one; None: its own's
    decode: bool = field(default=False, metadata={"static": True})  # T == R and token r is row r's only one
    verify: bool = field(
        default=False, metadata={"static": True}
    )  # each token as a decode computes it, so drafts change no bit

    @property
    def used(self) -> jax.Array:
        """Tokens that are not padding, i32 []: the first ones, but for rows of decodes that have ended among them."""
        if not self.decode:
            return self.query_start[-1]
        return up_to_last(self.kv_len > 0)

    @property
    def sees_all(self) -> bool:
        """Whether a query sees all keys before it, as far as its window goes, and no others."""
        return self.last_key is None and not self.first_key and self.end_key is None

    @property
    def rows(self) -> jax.Array:
        """The row of each token, i32 [T]; of padding some row."""
        tokens = jnp.arange(len(self.kv_index))
        return jnp.clip(jnp.searchsorted(self.query_start, tokens, side="right") - 1, 0, len(self.kv_len) - 1)

    @property
    def positions(self) -> jax.Array:
        """The position of each token in its sequence, i32 [T]."""
        rows = self.rows
        return self.kv_len[rows] - self.query_start[rows + 1] + jnp.arange(len(self.kv_index))

    def places(self, page_size: int) -> jax.Array:
        """``kv_index`` among the pages of all layers, i32 [T]."""
        return self.kv_index + self.first_page * page_size


def up_to_last(used: jax.Array) -> jax.Array:
    """How many of the first rows include all that are used: bool [N] to i32 []."""
    return jnp.max(jnp.where(used, jnp.arange(1, len(used) + 1, dtype=jnp.int32), 0))


def make_pages(
    *,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    as_bits: bool = False,
    as_words: bool = False,
    calibration: jax.Array | None = None,
    value_dim: int | None = None,
) -> KVPages:
    """Zeroed pages of one layer or several.

    Args:
        dtype: float32, bfloat16, float16, int8, float8_e4m3fn or float8_e5m2.
        as_bits: keep two-byte floats as uint16 (for CPUs).
        as_words: keep four numbers of one byte as uint32 where they fill words (for devices that nothing is known of).
        calibration: f32 [2, 2], scale and zero point of keys and of values, for one-byte types; None: a scale for each
            token and head is computed when it is stored. Latent pages have one of each, f32 [1, 2].
        value_dim: pages are latent: the value is the key's first ``value_dim`` elements.
    """
    layout = KVLayout.of(dtype, page_size=page_size, calibrated=calibration is not None, value_dim=value_dim)
    stored = layout.dtype
    if stored.itemsize == 1:
        stored = jnp.dtype(jnp.uint8)
    elif stored.itemsize == 2 and as_bits:
        stored = jnp.dtype(jnp.uint16)
    row = head_dim
    if as_words and layout.dtype.itemsize == 1 and row % 4 == 0:
        stored, row = jnp.dtype(jnp.uint32), row // 4
    shape = (num_pages, layout.parts, num_kv_heads, layout.rows(head_dim), row)
    return KVPages(data=zeros(shape, stored), calibration=calibration, layout=layout)
