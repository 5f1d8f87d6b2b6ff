"""Pages are the same in engines that divide a model differently."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from llmjax.engine.core.tier import KeptPage
from llmjax.engine.tiers.whole_pages import PageParts, WholePageFormat
from llmjax.models.layers.shares import HeadShares

LAYERS, HEADS = 4, 3
WHOLE = np.random.default_rng(0).normal(size=(LAYERS, 2, HEADS, 4, 1)).astype(np.float32)
OTHERS = np.random.default_rng(1).normal(size=(2 * LAYERS, 1, HEADS, 2)).astype(np.float16)  # of another stack


def shape_of(array: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def by_heads(ranks: int, devices: int) -> PageParts:
    """An engine whose devices divide heads."""
    heads = HeadShares(HEADS, 2, devices).share_of_keys.reshape(-1).tolist()
    own = tuple(shape_of(array[:, :, :1].repeat(len(heads) // ranks, 2)) for array in (WHOLE, OTHERS))
    axis = 2 if ranks > 1 else None
    return PageParts((own,) * ranks, tuple(range(ranks)), (axis, axis), tuple(heads))


def by_layers(*layers: int) -> PageParts:
    """An engine with a stage for each number of layers; rank 0 has the last one."""
    *rest, last = [(shape_of(WHOLE[:count]), shape_of(OTHERS[: 2 * count])) for count in layers]
    return PageParts((last, *rest), (*range(1, len(layers)), 0), (0, 0))


ENGINES = {
    "one device": PageParts(((shape_of(WHOLE), shape_of(OTHERS)),), (0,), (None, None)),
    "two devices of a process": by_heads(1, 2),
    "two processes": by_heads(2, 2),
    "two processes of two devices": by_heads(2, 4),
    "five processes": by_heads(5, 5),
    "two stages": by_layers(3, 1),
    "three stages": by_layers(1, 2, 1),
}


@pytest.mark.parametrize(("giver", "taker"), list(itertools.permutations(ENGINES, 2)))
def test_what_one_gives_another_has(giver: str, taker: str) -> None:
    gives, takes = ENGINES[giver], ENGINES[taker]
    assert [shape.shape for shape in gives.whole] == [WHOLE.shape, OTHERS.shape]
    formats = [WholePageFormat(4, parts.whole, parts) for parts in (gives, takes)]
    page = KeptPage((1, 2, 3, 4), gives.divided((WHOLE, OTHERS)))
    found = formats[1].decode(formats[0].encode(page))
    assert found.tokens == page.tokens
    for part, expected, shape in zip(
        found.content, takes.divided((WHOLE, OTHERS)), itertools.chain(*takes.shapes), strict=True
    ):
        assert part.shape == shape.shape
        np.testing.assert_array_equal(part, expected)
    for array, expected in zip(takes.joined(found.content), (WHOLE, OTHERS), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_devices_have_the_heads_that_their_queries_read() -> None:
    """And zeros where they have fewer than others."""
    (first, _, second, _) = by_heads(2, 2).divided((WHOLE, OTHERS))
    np.testing.assert_array_equal(first, WHOLE[:, :, :2])
    np.testing.assert_array_equal(second[:, :, 0], WHOLE[:, :, 2])
    assert not second[:, :, 1].any()


def test_vectors_that_heads_share_are_on_all_ranks() -> None:
    vectors = WHOLE[:, 0, 0]
    parts = PageParts(((shape_of(vectors),),) * 3, (0, 1, 2), (None,))
    assert parts.whole == (shape_of(vectors),)
    for array in (*parts.divided((vectors,)), *parts.joined((vectors,) * 3)):
        np.testing.assert_array_equal(array, vectors)
