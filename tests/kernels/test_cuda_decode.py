"""How decodes for CUDA are divided: by how long rows are. Work is counted here, and what is found is compared with the
reference."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.kernels.attention import reference
from llmjax.kernels.cuda.decode import decode
from llmjax.kernels.cuda.flash import QueryRules
from llmjax.kernels.cuda.split import IDLE, WHOLE, Parts, Split
from tests.kernels.attention_case import Case, filled_pages, make_data

HURRY = {"xla_backend_optimization_level": "0"}


def parts_of(
    kv_len: list[int], *, shares: int, keys: int = 64, window: int | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    rules = QueryRules(scale=1.0, window=window, softcap=None)
    longest = max(1, *kv_len) if window is None else min(window, max(1, *kv_len))
    split = Split(shares=shares, heads=16, keys=keys)
    parts = Parts.of(jnp.asarray(kv_len, jnp.int32), rules, split, most_keys=longest)
    return np.asarray(parts.programs), np.asarray(parts.rows), parts.most


def blocks_of(programs: np.ndarray, keys: int = 64) -> np.ndarray:
    """The blocks that each program reads."""
    return -(-(programs[:, 2] - programs[:, 1]) // keys)


@settings(max_examples=25, deadline=None)
@given(
    kv_len=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 40_000)), min_size=2, max_size=40),
    shares=st.integers(1, 130),
    keys=st.sampled_from([16, 64]),
    window=st.sampled_from([None, 1, 100, 4096]),
)
@pytest.mark.slow
def test_programs_share_the_keys_of_all_rows_evenly(
    kv_len: list[int], shares: int, keys: int, window: int | None
) -> None:
    programs, rows, most = parts_of(kv_len, shares=shares, keys=keys, window=window)
    seen = [min(n, window or n) for n in kv_len]
    share = max(1, -(-sum(-(-n // keys) for n in seen) // shares))
    assert blocks_of(programs, keys).max() <= share
    assert len(programs) <= len(kv_len) + shares
    numbers = []
    for row, (length, visible) in enumerate(zip(kv_len, seen, strict=True)):
        own = programs[(programs[:, 0] == row) & (programs[:, 3] != IDLE)]
        edges = own[:, 1:3]
        assert (edges[0, 0], edges[-1, 1]) == (length - visible, length)  # all that it sees, each key once
        np.testing.assert_array_equal(edges[1:, 0], edges[:-1, 1])
        if len(own) == 1:
            assert own[0, 3] == WHOLE
            assert rows[row, 1] == 0
        else:
            np.testing.assert_array_equal(own[:, 3], rows[row, 0] + np.arange(rows[row, 1]))
            numbers += own[:, 3].tolist()
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < most for number in numbers)


def test_a_long_row_does_not_keep_short_ones_waiting() -> None:
    """63 short requests and one of 32k. A program a row would have 512 blocks for one and 8 for the others."""
    programs, _, _ = parts_of([500] * 63 + [32768], shares=64)
    blocks = blocks_of(programs)
    assert blocks.sum() == 63 * 8 + 512
    assert blocks.max() == 16  # a share of 64
    assert (blocks == 16).sum() == 32
    assert (programs[:, 3] == WHOLE).sum() == 63  # which nobody merges


def test_equal_rows_that_fill_a_card_stay_whole() -> None:
    programs, rows, _ = parts_of([1000] * 64, shares=64)
    assert (programs[:, 3] == WHOLE).sum() == 64
    assert (rows[:, 1] == 0).all()


def test_a_row_alone_is_shared_by_all_programs() -> None:
    programs, rows, _ = parts_of([32768, 0], shares=64)
    assert sorted(blocks_of(programs).tolist()) == [0, 0] + [8] * 64
    assert rows.tolist()[0] == [0, 64]


MIXES = {
    "one long row": Case(((1, 700), (1, 3), (0, 0), (1, 40), (1, 17)), decode=True, heads=4, head_dim=16),
    "everything": Case(
        ((1, 300), (1, 500), (1, 2), (1, 130)),
        decode=True,
        heads=3,
        kv_heads=1,
        head_dim=24,
        page_size=3,
        cache="int8",
        window=200,
        softcap=4.0,
        sinks=True,
    ),
    "latent": Case(((1, 400), (1, 9)), decode=True, heads=20, kv_heads=1, head_dim=48, value_dim=32, sinks=True),
}


@pytest.mark.parametrize(
    "shares", [pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(40, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", MIXES)
def test_equals_the_reference_however_rows_are_divided(name: str, shares: int) -> None:
    """With more parts than are merged at a time, fewer, and none."""
    case = MIXES[name]
    data = make_data(case)
    pages = filled_pages(case, data.filling, as_bits=False)
    pages = reference.write_kv(pages, data.k, data.v, data.batch.places(case.page_size))
    split = Split(shares=shares, heads=16, keys=16)
    run = partial(decode, rules=QueryRules(**data.rules), split=split, interpret=True)
    arguments = jnp.asarray(data.q), pages, data.batch, data.sinks
    out = np.asarray(jax.jit(run).lower(*arguments).compile(HURRY)(*arguments))
    expected = reference.ragged_paged_attention(data.q, pages, data.batch, sinks=data.sinks, **data.rules)
    np.testing.assert_allclose(out[data.real], expected[data.real], atol=2e-5, rtol=0)
    assert (out[~data.real] == 0).all()
