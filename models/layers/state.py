"""The state that a layer keeps from step to step: each mixer declares it, and the engine allocates and manages it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from llmjax.kernels.attention import KVLayout, KVPages, make_pages
from llmjax.kernels.sharding import WHOLE, Axes
from llmjax.kernels.zeros import zeros

# The most elements of an array: 32-bit indices, which kernels for GPUs compute with, are enough for it, and no device
# needs memory for all layers in one piece.
MAX_ELEMENTS = 1 << 31


@dataclass(frozen=True)
class AllTokens:
    """The next token needs the KV entries of every token before it."""

    @property
    def order(self) -> tuple[int, int]:
        """The sort key among all spans."""
        return (0, 0)


@dataclass(frozen=True)
class LastTokens:
    """The next token needs the KV entries of the last tokens."""

    window: int  # number of tokens, the next one included

    @property
    def order(self) -> tuple[int, int]:
        """The sort key among all spans."""
        return (1, self.window)


@dataclass(frozen=True)
class LastState:
    """The next token needs the state after the token before it, which each token rewrites."""

    @property
    def order(self) -> tuple[int, int]:
        """The sort key among all spans."""
        return (2, 0)


Span = AllTokens | LastTokens | LastState
"""The tokens whose KV entries or states a layer needs; layers of one span share page tables."""


class Paged(ABC):
    """A KV entry for each token, in pages."""

    window: int | None  # number of keys that a query sees, its own included; None: all before it
    kv_heads: int
    head_dim: int
    value_dim: int | None  # number of leading entries of a key that are its value; None: values are stored too

    @property
    def span(self) -> Span:
        """The tokens whose keys the next token needs."""
        return AllTokens() if self.window is None else LastTokens(self.window)

    @abstractmethod
    def axes(self, pages: KVPages) -> KVPages:
        """The pages, with logical axes in place of the arrays."""

    def layout(self, layout: KVLayout) -> KVLayout:
        """The layout in which pages of this kind are stored.

        Args:
            layout: type, page size and scales, which are equal for all layers.
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
        as_words: bool = False,
        calibration: jax.Array | None = None,
    ) -> KVPages:
        """Zeroed pages; arguments as in ``llmjax.kernels.attention.make_pages``."""
        return make_pages(
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=dtype,
            as_bits=as_bits,
            as_words=as_words,
            calibration=calibration,
        )


@dataclass(frozen=True, kw_only=True)
class PagedKV(Paged):
    """Keys and values of every token, or of the tokens in a window."""

    kv_heads: int
    head_dim: int
    window: int | None = None
    value_dim: None = field(default=None, init=False)

    def axes(self, pages: KVPages) -> KVPages:
        return replace(pages, data=Axes((None, None, "kv_heads", None, None)), calibration=WHOLE)


@dataclass(frozen=True, kw_only=True)
class LatentKV(Paged):
    """One vector for each token, which all heads share and whose first entries are also the value."""

    dim: int
    value_dim: int

    kv_heads: int = field(default=1, init=False)
    window: None = field(default=None, init=False)

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        return self.dim

    def axes(self, pages: KVPages) -> KVPages:
        return replace(pages, data=WHOLE, calibration=WHOLE)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentState:
    """The states of recurrent layers: N for each layer, of which entry 0 belongs to padding.

    The page table of a sequence names an entry for each page. The state after a token is in the entry of the token's
    page: the first token of a page reads the entry of the page before, and the entry of a full page stays as a
    snapshot at its end.
    """

    recent: jax.Array | None  # f32 [N, tokens, channels], the last inputs of a convolution; None: there is none
    memory: jax.Array | None  # f32 [N, H, key size, value size]; None: only a convolution
    page_size: int = field(metadata={"static": True})  # tokens

    @property
    def num_pages(self) -> int:
        """The number of states of all layers."""
        return len(jax.tree.leaves(self)[0])


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """A state of fixed size, which each token rewrites: shapes of RecurrentState's arrays without the first axis."""

    recent: tuple[int, int] | None = None
    memory: tuple[int, int, int] | None = None

    span: ClassVar[Span] = LastState()

    def axes(self, state: RecurrentState) -> RecurrentState:
        """The state, with logical axes in place of the arrays.

        A device's channels are those of its heads, so that the order of all channels depends on the number of devices.
        """
        recent = None if state.recent is None else Axes((None, None, "channels"))
        return replace(state, recent=recent, memory=None if state.memory is None else Axes((None, "heads")))

    def page_bytes(self, layout: KVLayout) -> int:
        """Bytes of one state; the ``layout`` of pages does not matter."""
        return 4 * sum(prod(shape) for shape in (self.recent, self.memory) if shape is not None)

    def make(
        self,
        *,
        num_pages: int,
        page_size: int,
        dtype: jnp.dtype,
        as_bits: bool = False,
        as_words: bool = False,
        calibration: jax.Array | None = None,
    ) -> RecurrentState:
        """Zeroed states.

        Args:
            num_pages: number of states.
            page_size: number of tokens after which the state moves to another entry.
            dtype, as_bits, as_words, calibration: unused; they are about keys and values, and states are always f32.
        """

        def entries(shape: tuple[int, ...] | None) -> jax.Array | None:
            return None if shape is None else zeros((num_pages, *shape), jnp.float32)

        return RecurrentState(recent=entries(self.recent), memory=entries(self.memory), page_size=page_size)


LayerState = KVPages | RecurrentState
"""The state of a layer on the device."""

StateKind = PagedKV | LatentKV | Recurrent


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerStack:
    """The states of layers of one kind, one layer after another along the first axis of each array.

    They share arrays because each array that is donated costs the host several microseconds in every dispatch.
    """

    state: LayerState
    layers: tuple[int, ...] = field(metadata={"static": True})  # their indices into ``ModelConfig.states``

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.state.page_size

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The arrays with an entry for each page of each layer, [layers * pages, …]."""
        return (self.state.data,) if isinstance(self.state, KVPages) else tuple(jax.tree.leaves(self.state))

    def with_arrays(self, arrays: Sequence[jax.Array]) -> LayerStack:
        """The stack with other arrays in place of `arrays`."""
        if isinstance(self.state, KVPages):
            return replace(self, state=self.state.with_data(arrays[0]))
        return replace(self, state=jax.tree.unflatten(jax.tree.structure(self.state), list(arrays)))

    def axes(self, kinds: Sequence[StateKind | None]) -> LayerStack:
        """The stack, with logical axes in place of the arrays; ``kinds``: the state kinds of all layers."""
        state: Any = self.state
        kind = kinds[self.layers[0]]
        assert kind is not None
        return replace(self, state=kind.axes(state))

    def first_page(self, index: int) -> jax.Array:
        """The index of the first page of ``layers[index]``, i32 []."""
        return jnp.asarray(index * (self.state.num_pages // len(self.layers)), jnp.int32)

    def of(self, index: int) -> LayerState:
        """The state that ``layers[index]`` gets; its page numbers count over all layers."""
        if isinstance(self.state, KVPages) and self.state.calibration is not None:
            return replace(self.state, calibration=self.state.calibration[index])
        return self.state

    def after(self, state: LayerState) -> LayerStack:
        """The stack after a layer has updated the state that `of` gave it."""
        if isinstance(state, KVPages) and isinstance(self.state, KVPages):
            state = self.state.with_data(state.data)
        return replace(self, state=state)


def make_stacks(
    kinds: Sequence[StateKind | None],
    *,
    num_pages: Mapping[Span, int],
    page_size: int,
    dtype: jnp.dtype,
    as_bits: bool = False,
    as_words: bool = False,
    calibration: jax.Array | None = None,
    max_elements: int = MAX_ELEMENTS,
) -> tuple[LayerStack, ...]:
    """Zeroed states of all layers of a model: a stack for each kind, or several if one would be too large.

    Args:
        kinds: the state kinds, ``ModelConfig.states``.
        num_pages: number of pages of each layer, for each span.
        page_size: number of tokens in a page.
        dtype, as_bits, as_words: format of keys and values, see ``llmjax.kernels.attention.make_pages``.
        calibration: f32 [layers, 2, 2], the same function's argument for each layer.
        max_elements: the most elements of an array; an array for a single layer may be larger.
    """
    layers: dict[StateKind, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if kind is not None:
            layers.setdefault(kind, []).append(layer)
    stacks = []
    for kind, numbers in layers.items():
        pages = num_pages[kind.span]
        make = partial(kind.make, page_size=page_size, dtype=dtype, as_bits=as_bits, as_words=as_words)
        largest = max(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(partial(make, num_pages=pages))))
        count = -(-len(numbers) // max(1, max_elements // largest))
        each = -(-len(numbers) // count)
        for first in range(0, len(numbers), each):
            some = tuple(numbers[first : first + each])
            scales = None if calibration is None or isinstance(kind, Recurrent) else calibration[jnp.asarray(some)]
            stacks.append(LayerStack(make(num_pages=len(some) * pages, calibration=scales), some))
    return tuple(stacks)
