"""Rows of chunks: where their tokens, keys and pages are."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.attention import RaggedBatch
from llmjax.models.errors import UnsupportedModel
from llmjax.models.layers.chunks import Sharpening, by_chunk


def batch(starts: list[int], lengths: list[int], tokens: int, *, decode: bool = False) -> RaggedBatch:
    rows = len(lengths)
    return RaggedBatch(
        query_start=jnp.array(starts),
        kv_len=jnp.array(lengths),
        page_table=10 * jnp.arange(rows)[:, None] + jnp.arange(8),
        kv_index=jnp.zeros(tokens, jnp.int32),
        decode=decode,
    )


def test_a_row_whose_tokens_are_in_several_chunks() -> None:
    """Tokens 6 to 12 of a sequence, and the first two of another, in chunks of 4 over pages of 2."""
    got = by_chunk(batch([0, 7, 9], [13, 2], 10), 4, page_size=2)
    spans = list(zip(got.query_start[:-1].tolist(), got.query_start[1:].tolist(), strict=True))
    assert [(*span, int(length)) for span, length in zip(spans, got.kv_len, strict=True)] == [
        *((0, 2, 4), (2, 6, 4), (6, 7, 1), (7, 7, 0)),
        *((7, 9, 2), (9, 9, 0), (9, 9, 0), (9, 9, 0)),
    ]
    np.testing.assert_array_equal(got.page_table[:3], [[2, 3], [4, 5], [6, 7]])
    np.testing.assert_array_equal(got.page_table[4], [10, 11])


def test_decodes_keep_their_rows_and_padding_stays_empty() -> None:
    got = by_chunk(batch([0, 1, 2, 3], [9, 4, 0], 3, decode=True), 4, page_size=2)
    assert got.kv_len.tolist() == [1, 4, 0] and got.query_start.tolist() == [0, 1, 2, 3]
    assert got.page_table[:2].tolist() == [[4, 5], [10, 11]]


def test_chunks_consist_of_pages() -> None:
    with pytest.raises(UnsupportedModel, match="attention_chunk_size = 6 is not a multiple of page_size = 4"):
        by_chunk(batch([0, 1], [1], 1), 6, page_size=4)


def test_factors_of_queries() -> None:
    got = Sharpening(4, 0.5).factors(batch([0, 3, 4], [5, 20], 5))
    expected = 1 + 0.5 * np.log1p([0, 1, 1, 5])  # positions 2, 3, 4 and 19
    np.testing.assert_allclose(got[:4], expected, rtol=1e-6)
