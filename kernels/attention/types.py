"""The nouns of paged attention. Letters: T tokens, R requests, P pages a request, N pages, H query heads, K key/value
heads, h head size."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """The pages of one layer. Page 0 is the dummy page: padding reads and writes it, nobody owns it.

    The arrays hold ``dtype`` or, where that is two bytes wide and XLA cannot index such floats in place (CPU: it would
    widen the whole array at every access), the same bits as uint16.
    """

    k: jax.Array  # [N, K, page_size, h]
    v: jax.Array  # [N, K, page_size, h]
    dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    def encode(self, x: jax.Array) -> jax.Array:
        """Values as the arrays store them."""
        x = x.astype(self.dtype)
        return x if self.k.dtype == self.dtype else jax.lax.bitcast_convert_type(x, self.k.dtype)

    def decode(self, x: jax.Array) -> jax.Array:
        """Stored elements as f32."""
        x = x if self.k.dtype == self.dtype else jax.lax.bitcast_convert_type(x, self.dtype)
        return x.astype(jnp.float32)


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
    slots: jax.Array  # i32 [T], page * page_size + offset where each token's K and V go; dummy page for padding
    decode: bool = field(default=False, metadata={"static": True})  # T == R and token r is row r's only one


def make_pages(
    *, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype, as_bits: bool = False
) -> KVPages:
    """Zeroed pages of one layer.

    Args:
        as_bits: keep two-byte floats as uint16 (for CPUs).
    """
    dtype = jnp.dtype(dtype)
    stored = jnp.dtype(jnp.uint16) if as_bits and dtype.itemsize == 2 else dtype
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    return KVPages(k=jnp.zeros(shape, stored), v=jnp.zeros(shape, stored), dtype=dtype)
