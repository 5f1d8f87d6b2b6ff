"""Attention to chosen keys, and the choice, against the reference in NumPy."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.attention import chosen as module
from llmjax.kernels.attention import reference
from llmjax.kernels.attention.chosen import attend_chosen, best_keys
from llmjax.kernels.attention.types import KVPages
from llmjax.kernels.loops import bounded_loops
from tests.kernels.attention_case import Case, Data, empty_pages, filled_pages, make_data, owned, without_unseen

PAGE = 4
MIXED = ((1, 50), (1, 3), (13, 13), (21, 60), (1, 12), (2, 2))
DECODES = ((1, 1), (1, 37), (1, 9), (1, 64))
KINDS = {  # type of pages, as bits, as words
    "f32": ("float32", False, False),
    "bf16 bits": ("bfloat16", True, False),
    "int8": ("int8", False, False),
    "e4m3 in words": ("float8_e4m3fn", False, True),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEYS", 8)
    monkeypatch.setattr(module, "TOKENS", 8)


def case_of(lengths: tuple[tuple[int, int], ...], kind: str = "f32", *, value_dim: int = 5) -> Case:
    return Case(
        lengths,
        heads=3,
        kv_heads=1,
        head_dim=8,
        page_size=PAGE,
        cache=KINDS[kind][0],
        decode=lengths == DECODES,
        value_dim=value_dim,
    )


def pages_of(data: Data, kind: str) -> KVPages:
    _, as_bits, as_words = KINDS[kind]
    pages = filled_pages(data.case, data.filling, as_bits=as_bits)
    if not as_words:
        return pages
    empty = empty_pages(data.case, as_words=True)
    return replace(empty, data=np.asarray(pages.data).view(np.uint32))


def seen_by(data: Data) -> list[tuple[int, int]]:
    """The row and position of each real token."""
    found = []
    for row, (count, length) in enumerate(data.case.lengths):
        found += [(row, position) for position in range(length - count, length)]
    return found


def in_bytes(pages: KVPages) -> KVPages:
    return replace(pages, data=jnp.asarray(np.asarray(pages.data).view(np.uint8))) if pages.in_words else pages


@pytest.mark.parametrize("lengths", [MIXED, DECODES])
@pytest.mark.parametrize("kind", KINDS)
def test_all_keys_are_those_of_plain_attention(lengths: tuple[tuple[int, int], ...], kind: str) -> None:
    data = make_data(case_of(lengths, kind))
    positions, rng = np.full((len(data.q), 70), -1, np.int32), np.random.default_rng(1)
    for token, (_, position) in zip(np.flatnonzero(data.real), seen_by(data), strict=True):
        positions[token, : position + 1] = rng.permutation(position + 1)  # in any order
    pages, scale = pages_of(data, kind), data.rules["scale"]
    out, written = jax.jit(
        lambda q, k, pages: attend_chosen(q, k, None, pages, data.batch, scale=scale, chosen=positions)
    )(data.q, data.k, pages)
    expected_pages = reference.write_kv(in_bytes(pages), data.k, None, data.batch.places(PAGE))
    expected = reference.ragged_paged_attention(data.q, expected_pages, data.batch, scale=scale)
    np.testing.assert_array_equal(owned(data.case, in_bytes(written).data), owned(data.case, expected_pages.data))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(np.asarray(out)[data.real], expected[data.real], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("lengths", [MIXED, DECODES])
def test_chosen_keys_are_the_best(lengths: tuple[tuple[int, int], ...], bounded: bool) -> None:
    data, count = make_data(case_of(lengths, value_dim=8)), 11
    data = without_unseen(data)  # what an earlier owner has left in pages
    weights = np.random.default_rng(3).standard_normal(data.q.shape[:2]).astype(np.float32)
    pages = filled_pages(data.case, data.filling, as_bits=False)

    @jax.jit
    def compute(q, weights, k, pages):
        with bounded_loops(bounded):
            return best_keys(q, weights, k[:, 0], pages, data.batch, scale=0.3, count=count)

    found, _ = compute(data.q, weights, data.k, pages)
    keys = np.asarray(reference.write_kv(pages, data.k, None, data.batch.places(PAGE)).data)[:, 0, 0]
    table = np.asarray(data.batch.first_page + data.batch.page_table)
    for token, (row, position) in zip(np.flatnonzero(data.real), seen_by(data), strict=True):
        mine = keys[table[row]].reshape(-1, keys.shape[-1])[: position + 1].astype(np.float64)
        scores = weights[token] @ np.maximum(0.3 * data.q[token] @ mine.T, 0)
        best = np.asarray(found[token])
        kept = best[best >= 0]
        assert len(kept) == min(count, position + 1) and len(set(kept)) == len(kept) and kept.max() <= position
        assert (best[len(kept) :] == -1).all()
        np.testing.assert_allclose(scores[kept], np.sort(scores)[::-1][: len(kept)], atol=1e-5)
    assert (np.asarray(found)[~data.real] == -1).all() or lengths == DECODES


def test_only_what_is_chosen_counts() -> None:
    data = make_data(case_of(MIXED))
    pages, scale = pages_of(data, "f32"), data.rules["scale"]
    positions = np.full((len(data.q), 3), -1, np.int32)
    for token, (_, position) in zip(np.flatnonzero(data.real), seen_by(data), strict=True):
        positions[token, 0] = position // 2
    out, _ = attend_chosen(data.q, data.k, None, pages, data.batch, scale=scale, chosen=jnp.asarray(positions))
    keys = np.asarray(reference.write_kv(pages, data.k, None, data.batch.places(PAGE)).data)[:, 0, 0]
    table = np.asarray(data.batch.first_page + data.batch.page_table)
    for token, (row, position) in zip(np.flatnonzero(data.real), seen_by(data), strict=True):
        value = keys[table[row]].reshape(-1, keys.shape[-1])[position // 2, :5]
        np.testing.assert_allclose(np.asarray(out)[token], np.tile(value, (3, 1)), atol=1e-6)
