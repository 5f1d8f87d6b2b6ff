"""What a layer keeps from step to step: each mixer declares it, the engine makes it and keeps books."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentState:
    """What recurrent layers keep of S sequences, each in its slot; slot 0 belongs to padding."""

    recent: jax.Array  # f32 [S, tokens, channels], the last inputs of a convolution
    memory: jax.Array  # f32 [S, H, key size, value size]


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """State whose size does not grow with the sequence: shapes of RecurrentState's arrays without the slots."""

    recent: tuple[int, int]
    memory: tuple[int, int, int]

    def make(self, *, num_slots: int) -> RecurrentState:
        """Zeros for so many sequences, slot 0 included."""
        return RecurrentState(recent=jnp.zeros((num_slots, *self.recent)), memory=jnp.zeros((num_slots, *self.memory)))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence in one layer."""
        return 4 * (prod(self.recent) + prod(self.memory))
