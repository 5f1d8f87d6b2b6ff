"""What a layer keeps from step to step: each mixer declares it, the engine makes it and keeps books."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from llmjax.kernels.attention import KVLayout, KVPages, make_pages
from llmjax.kernels.sharding import WHOLE, Axes


@dataclass(frozen=True, kw_only=True)
class PagedKV:
    """Keys and values of every token, or of those that a window still shows, in pages."""

    kv_heads: int
    head_dim: int
    window: int | None = None  # keys that a query sees, its own included; None: all before it
    value_dim: int | None = None  # leading entries of a key that are its value; None: values are kept beside keys

    def axes(self, pages: KVPages) -> KVPages:
        """The pages with the logical axes of their arrays in place of these."""
        data = Axes((None, None, None if self.value_dim else "kv_heads", None, None))
        return replace(pages, data=data, calibration=WHOLE)

    def layout(self, layout: KVLayout) -> KVLayout:
        """How pages of this kind are stored.

        Args:
            layout: type, page size and scales, which are the same for all layers.
        """
        return replace(layout, value_dim=self.value_dim)

    def page_bytes(self, layout: KVLayout) -> int:
        """Bytes of a page of one layer, scales included; ``layout`` as in `layout`."""
        return self.layout(layout).page_bytes(num_kv_heads=self.kv_heads, head_dim=self.head_dim)

    def make(
        self,
        *,
        num_pages: int,
        page_size: int,
        dtype: jnp.dtype,
        as_bits: bool = False,
        calibration: jax.Array | None = None,
    ) -> KVPages:
        """Zeroed pages of one layer; arguments as in ``llmjax.kernels.attention.make_pages``."""
        return make_pages(
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=dtype,
            as_bits=as_bits,
            calibration=calibration,
        )


def latent_kv(*, dim: int, value_dim: int) -> PagedKV:
    """One vector of ``dim`` entries a token that all heads share, whose first ``value_dim`` are the value too."""
    return PagedKV(kv_heads=1, head_dim=dim, value_dim=value_dim)
