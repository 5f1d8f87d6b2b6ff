"""The whole content of a page, joined from the parts of devices and processes, so that servers that divide a model
differently can exchange pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.engine.core.tier import KeptPage, PageContent
from llmjax.engine.device.page_moves import divided_axis, page_shapes, stacks_of
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.engine.ranks.group import RankZero
from llmjax.engine.tiers.host import PageFormat
from llmjax.models import Attention
from llmjax.models.layers.shares import NOTHING, HeadShares
from llmjax.models.layers.state import PagedKV, Recurrent

LAYERS, HEADS = 0, 2  # axes of a page's content [layers, …], as ``PagedKV.axes`` has them

Shapes = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class PageParts:
    """How a page is divided among the ranks of an engine.

    Args:
        shapes: shapes of each rank's part, one for each stack of layers.
        order: the ranks, in the order in which their parts follow each other.
        axes: the axis along which ranks divide each array; None: each rank has all of it.
        heads: key/value heads of all devices, one device after another, NOTHING where one has less; None: all heads in
            their order, or vectors that heads share.
    """

    shapes: tuple[Shapes, ...]
    order: tuple[int, ...]
    axes: tuple[int | None, ...]
    heads: tuple[int, ...] | None = None

    @property
    def whole(self) -> Shapes:
        """Shapes of the whole page's content."""
        shapes = []
        for number, axis in enumerate(self.axes):
            first = self.shapes[0][number]
            shape = list(first.shape)
            if axis is not None:
                shape[axis] = sum(own[number].shape[axis] for own in self.shapes)
            if self.heads is not None:
                shape[HEADS] = max(self.heads) + 1
            shapes.append(jax.ShapeDtypeStruct(tuple(shape), first.dtype))
        return tuple(shapes)

    def joined(self, content: PageContent) -> PageContent:
        """The whole page's content.

        Args:
            content: the arrays of rank 0, of rank 1, and so on.
        """
        arrays = []
        for number, axis in enumerate(self.axes):
            parts = [content[rank * len(self.axes) + number] for rank in self.order]
            array = parts[0] if axis is None else np.concatenate(parts, axis)
            if self.heads is not None:  # one of those that have it
                array = array[:, :, [self.heads.index(head) for head in range(max(self.heads) + 1)]]
            arrays.append(array)
        return tuple(arrays)

    def divided(self, content: PageContent) -> PageContent:
        """The ranks' parts of a page with this content: the inverse of `joined`, with zeros for NOTHING."""
        parts_by_rank = [[*own] for own in self.shapes]
        for number, (array, axis) in enumerate(zip(content, self.axes, strict=True)):
            if self.heads is not None:
                heads = np.array(self.heads)
                array = array[:, :, heads]  # a copy
                array[:, :, heads == NOTHING] = 0
            at = 0
            for rank in self.order:
                part = array
                if axis is not None:
                    end = at + self.shapes[rank][number].shape[axis]
                    part, at = array[(slice(None),) * axis + (slice(at, end),)], end
                parts_by_rank[rank][number] = part
        return tuple(array for own in parts_by_rank for array in own)


@dataclass(frozen=True)
class WholePageFormat(PageFormat):
    """A group's pages as bytes that are the same in all engines of a model; ``shapes`` are those of `PageParts.whole`.

    Args:
        parts: how this engine divides a page.
    """

    parts: PageParts

    def encode(self, page: KeptPage) -> bytes:
        return super().encode(KeptPage(page.tokens, self.parts.joined(page.content)))

    def decode(self, payload: bytes) -> KeptPage:
        page = super().decode(payload)
        return KeptPage(page.tokens, self.parts.divided(page.content))


def page_parts(compiler: StepCompiler, ranks: RankZero, group: int) -> PageParts | None:
    """How a group's pages are divided; None: pages depend on the division, so other engines cannot use them."""
    own, others = page_shapes(compiler, group), ranks.page_shapes(group)
    there = [jax.ShapeDtypeStruct(form.shape, jnp.dtype(form.dtype)) for form in others]
    size, staged = ranks.size, compiler.is_staged
    if not own or len(there) != (size - 1) * len(own):  # stages with layers of other groups alone
        return None
    shapes = (own, *(tuple(there[at : at + len(own)]) for at in range(0, len(there), len(own))))
    kinds = [compiler.model.graph.config.states[layer] for layer in _first_layers(compiler, group)]
    if any(isinstance(kind, Recurrent) for kind in kinds):  # the order of channels depends on the number of devices
        return None
    axes = tuple(LAYERS if staged else divided_axis(array) for array in _arrays(compiler, group))
    parts = PageParts(shapes, (*range(1, size), 0) if staged else tuple(range(size)), axes)
    if not all(_fit(own, other, axes) for other in shapes):
        return None
    if not any(isinstance(kind, PagedKV) for kind in kinds):
        return parts
    if not all(isinstance(kind, PagedKV) for kind in kinds):
        return None
    span = compiler.kv_plan.groups[group].span
    mixers = [mixer for layer in compiler.model.config.layers for mixer in (layer.mixer, layer.beside)]
    counts = {
        (mixer.kv_heads, mixer.heads // mixer.kv_heads)
        for mixer in mixers
        if isinstance(mixer, Attention) and mixer.state.span == span
    }
    if len(counts) != 1:
        return None
    (kv_heads, queries) = counts.pop()
    heads = HeadShares(kv_heads, queries, len(compiler.platform.devices)).share_of_keys.reshape(-1).tolist()
    if any(shape.shape[HEADS] != len(heads) for shape in parts.whole):
        return None
    return parts if heads == list(range(kv_heads)) else PageParts(shapes, parts.order, axes, tuple(heads))


def _fit(one: Shapes, other: Shapes, axes: Sequence[int | None]) -> bool:
    """Whether arrays of two ranks differ only along the divided axes."""

    def rest(shape: jax.ShapeDtypeStruct, axis: int | None) -> tuple[object, ...]:
        return (shape.dtype, *(size for number, size in enumerate(shape.shape) if number != axis))

    return all(rest(a, axis) == rest(b, axis) for a, b, axis in zip(one, other, axes, strict=True))


def _first_layers(compiler: StepCompiler, group: int) -> list[int]:
    """The first layer of each stack."""
    return [compiler.state_shapes.kv[number].layers[0] for number in stacks_of(compiler, group)]


def _arrays(compiler: StepCompiler, group: int) -> list[jax.ShapeDtypeStruct]:
    """The arrays of a group of layers, as they are on all devices together."""
    stacks = [compiler.state_shapes.kv[number] for number in stacks_of(compiler, group)]
    return [array for stack in stacks for array in stack.arrays]
