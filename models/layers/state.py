"""What a layer keeps from step to step: each mixer declares it, the engine makes it and keeps books."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar

import jax
import jax.numpy as jnp

from llmjax.kernels.attention import KVLayout, KVPages, make_pages
from llmjax.kernels.sharding import WHOLE, Axes
from llmjax.kernels.zeros import zeros


@dataclass(frozen=True)
class AllTokens:
    """The next token needs what every token before it has left."""

    @property
    def order(self) -> tuple[int, int]:
        """Among all spans."""
        return (0, 0)


@dataclass(frozen=True)
class LastTokens:
    """The next token needs what the last tokens have left."""

    window: int  # how many, itself included

    @property
    def order(self) -> tuple[int, int]:
        """Among all spans."""
        return (1, self.window)


@dataclass(frozen=True)
class LastState:
    """The next token needs what the one before it has left: a state that each token rewrites."""

    @property
    def order(self) -> tuple[int, int]:
        """Among all spans."""
        return (2, 0)


Span = AllTokens | LastTokens | LastState
"""Which tokens' traces a layer needs; layers of one span share page tables."""


@dataclass(frozen=True, kw_only=True)
class PagedKV:
    """Keys and values of every token, or of those that a window still shows, in pages."""

    kv_heads: int
    head_dim: int
    window: int | None = None  # keys that a query sees, its own included; None: all before it
    value_dim: int | None = None  # leading entries of a key that are its value; None: values are kept beside keys

    @property
    def span(self) -> Span:
        """Which tokens' keys the next one needs."""
        return AllTokens() if self.window is None else LastTokens(self.window)

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
    """What one recurrent layer keeps: N states, of which entry 0 belongs to padding.

    The state after a token is in the entry that the sequence's page table names for the token's page: the first token
    of a page reads the entry of the page before, and a full page's entry stays as the snapshot at its end.
    """

    recent: jax.Array | None  # f32 [N, tokens, channels], the last inputs of a convolution; None: there is none
    memory: jax.Array | None  # f32 [N, H, key size, value size]; None: the convolution is all
    page_size: int = field(metadata={"static": True})  # tokens


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """A state of fixed size, rewritten by each token: shapes of RecurrentState's arrays without their first axis."""

    recent: tuple[int, int] | None = None
    memory: tuple[int, int, int] | None = None

    span: ClassVar[Span] = LastState()

    def axes(self, state: RecurrentState) -> RecurrentState:
        """The state with the logical axes of its arrays in place of these.

        A device's channels are those of its heads, so that the order of all channels depends on the number of devices.
        """
        recent = None if state.recent is None else Axes((None, None, "channels"))
        return replace(state, recent=recent, memory=None if state.memory is None else Axes((None, "heads")))

    def page_bytes(self, layout: KVLayout) -> int:
        """Bytes of one state, whatever the ``layout`` of pages is."""
        return 4 * sum(prod(shape) for shape in (self.recent, self.memory) if shape is not None)

    def make(
        self,
        *,
        num_pages: int,
        page_size: int,
        dtype: jnp.dtype,
        as_bits: bool = False,
        calibration: jax.Array | None = None,
    ) -> RecurrentState:
        """Zeroed states of one layer.

        Args:
            num_pages: states.
            page_size: tokens after which another entry takes the state.
            dtype, as_bits, calibration: of keys and values; states are always f32.
        """

        def entries(shape: tuple[int, ...] | None) -> jax.Array | None:
            return None if shape is None else zeros((num_pages, *shape), jnp.float32)

        return RecurrentState(recent=entries(self.recent), memory=entries(self.memory), page_size=page_size)


LayerState = KVPages | RecurrentState
"""What a layer keeps, on the device."""
