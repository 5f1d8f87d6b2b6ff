"""The portable attention against the reference over ragged mixes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import RaggedBatch, portable, reference
from kernels.attention.types import KVPages, make_pages

PAGE = 4


def ragged_batch(
    rng: np.random.Generator, lengths: list[tuple[int, int]], *, tokens: int, rows: int, pages: int, decode: bool
) -> RaggedBatch:
    """A batch with rows of (new tokens, length after them), on shuffled pages, padded to ``tokens`` and ``rows``."""
    free = iter(rng.permutation(np.arange(1, pages)))
    per_row = max(-(-kv // PAGE) for _, kv in lengths) + 2
    table = np.zeros((rows, per_row), np.int32)
    start = np.zeros(rows + 1, np.int32)
    kv_len = np.zeros(rows, np.int32)
    slots = np.zeros(tokens, np.int32)
    for r, (count, kv) in enumerate(lengths):
        table[r, : -(-kv // PAGE)] = [next(free) for _ in range(-(-kv // PAGE))]
        kv_len[r] = kv
        for i in range(count):
            position = kv - count + i
            slots[start[r] + i] = table[r, position // PAGE] * PAGE + position % PAGE
        start[r + 1] = start[r] + count
    start[len(lengths) + 1 :] = start[len(lengths)]
    return RaggedBatch(*(jnp.asarray(x) for x in (start, kv_len, table, slots)), decode=decode)


def filled_pages(
    rng: np.random.Generator,
    *,
    kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    as_bits: bool,
    calibration: jax.Array | None = None,
) -> KVPages:
    """80 pages with keys and values in every slot."""
    pages = make_pages(
        num_pages=80,
        page_size=PAGE,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        as_bits=as_bits,
        calibration=calibration,
    )
    k, v = (jnp.asarray(rng.standard_normal((80 * PAGE, kv_heads, head_dim)), jnp.float32) for _ in range(2))
    return reference.write_kv(pages, k, v, jnp.arange(80 * PAGE))


MIXES = {
    "decodes": [(1, 1), (1, 37), (1, 9), (1, 64)],
    "one prefill": [(29, 29)],
    "chunk of a long prompt": [(7, 61)],
    "decodes and chunks": [(1, 50), (1, 3), (13, 13), (21, 60), (1, 12), (2, 2)],
}


@pytest.mark.parametrize("mix", MIXES, ids=list(MIXES))
@pytest.mark.parametrize(
    "window,softcap,sinks", [(None, None, False), (6, None, False), (None, 20.0, True), (17, 5.0, True)]
)
@pytest.mark.parametrize(
    "heads,kv_heads,dtype,as_bits",
    [
        (6, 2, jnp.float32, False),
        (4, 4, jnp.float16, True),
        (8, 1, jnp.bfloat16, True),
        (2, 1, jnp.bfloat16, False),
        (6, 2, jnp.int8, True),
        (4, 1, jnp.float8_e4m3fn, False),
        (2, 2, jnp.float8_e5m2, True),
    ],
)
def test_portable_equals_reference(mix, window, softcap, sinks, heads, kv_heads, dtype, as_bits, monkeypatch):
    monkeypatch.setattr(portable, "KEY_BLOCK", 8)
    monkeypatch.setattr(portable, "QUERY_BLOCK", 8)
    rng, dtype = np.random.default_rng(0), jnp.dtype(dtype)
    lengths = MIXES[mix]
    used = sum(count for count, _ in lengths)
    decode = all(count == 1 for count, _ in lengths)
    rows = len(lengths) + 2
    tokens = rows if decode else used + 5
    head_dim = 8
    batch = ragged_batch(rng, lengths, tokens=tokens, rows=rows, pages=80, decode=decode)
    pages = filled_pages(rng, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, as_bits=as_bits)
    q = jnp.asarray(rng.standard_normal((tokens, heads, head_dim)), jnp.float32)
    k = jnp.asarray(rng.standard_normal((tokens, kv_heads, head_dim)), jnp.float32)
    v = jnp.asarray(rng.standard_normal((tokens, kv_heads, head_dim)), jnp.float32)
    rules = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    if sinks:
        rules["sinks"] = jnp.asarray(rng.standard_normal(heads), jnp.float32)

    written = portable.write_kv(pages, k, v, batch.slots)
    expected_pages = reference.write_kv(pages, k, v, batch.slots)
    # Padding tokens race for the dummy page; every other page must be equal to the bit.
    assert jnp.array_equal(written.data[1:], expected_pages.data[1:])
    out = jax.jit(lambda q, p: portable.ragged_paged_attention(q, p, batch, **rules))(q, written)
    expected = reference.ragged_paged_attention(q, written, batch, **rules)
    assert np.isfinite(np.asarray(out)).all()
    np.testing.assert_allclose(out[:used], expected[:used], atol=2e-6, rtol=1e-5)
