"""Every head and every unit is some device's, exactly once, and all devices have arrays of one shape."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from llmjax.kernels.sharding import Sharding, own_range, sharded
from llmjax.models.layers.shares import NOTHING, UNITS, HeadShares, even_share, inner_share, of_entries, spread_share

DEVICES = st.integers(1, 9)


@given(size=st.integers(1, 5000), devices=DEVICES, unit=st.sampled_from((1, *UNITS)))
def test_every_unit_is_one_devices(size: int, devices: int, unit: int) -> None:
    share = even_share(size, devices, unit=unit)
    there = share != NOTHING
    assert share[there].tolist() == list(range(size))
    assert share.shape[1] % unit == 0 and share.size - size < devices * unit
    starts = share[:, ::unit]
    assert (starts[starts != NOTHING] % unit == 0).all()


@given(size=st.integers(1, 300), devices=DEVICES)
def test_spread_as_a_program_counts(size: int, devices: int) -> None:
    share = spread_share(size, devices)
    assert share[share != NOTHING].tolist() == list(range(size))
    counts = (share != NOTHING).sum(axis=1)
    assert counts.max() == share.shape[1] and counts.max() - counts.min() <= 1
    mesh = AbstractMesh((devices,), ("tensor",))
    for device, row in enumerate(share):
        with patch("jax.lax.axis_index", lambda axis, device=device: device), sharded(Sharding(mesh)):
            first, last = own_range("experts", size)
        assert list(range(first, last)) == row[row != NOTHING].tolist()


@given(size=st.integers(1, 30000), devices=DEVICES)
def test_inner_columns_stay_together_where_it_costs_little(size: int, devices: int) -> None:
    share = inner_share(size, devices)
    assert share[share != NOTHING].tolist() == list(range(size))
    least = -(-size // devices)
    assert share.shape[1] <= max(least * 9 / 8, least + 15)
    assert share.shape[1] % 16 == 0


@given(kv_heads=st.integers(1, 40), group=st.integers(1, 24), devices=DEVICES)
def test_every_head_is_one_devices_with_the_key_that_it_reads(kv_heads: int, group: int, devices: int) -> None:
    shares = HeadShares(kv_heads, group, devices)
    queries, keys = shares.share_of_queries, shares.share_of_keys
    assert queries.shape == (devices, shares.heads) and keys.shape == (devices, shares.pieces)
    assert sorted(queries[queries != NOTHING].tolist()) == list(range(kv_heads * group))
    assert set(keys[keys != NOTHING].tolist()) == set(range(kv_heads))
    # As kernels pair them: query head i reads key/value head i // (H / K).
    read = np.repeat(keys, shares.heads // shares.pieces, axis=1)
    assert (read == np.where(queries == NOTHING, read, queries // group)).all()


def test_heads_that_divide_evenly_are_not_copied() -> None:
    assert HeadShares(8, 4, 4).share_of_keys.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert HeadShares(8, 4, 4).share_of_queries[1].tolist() == list(range(8, 16))
    assert HeadShares(8, 4, 1).share_of_queries.tolist() == [list(range(32))]


def test_a_key_is_on_several_devices_where_there_are_fewer_keys() -> None:
    shares = HeadShares(1, 8, 4)  # one key/value head for all
    assert (shares.pieces, shares.heads) == (1, 2)
    assert shares.share_of_keys.tolist() == [[0], [0], [0], [0]]
    assert shares.share_of_queries.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_does_not_divide_is_filled_up() -> None:
    shares = HeadShares(3, 3, 2)  # SmolLM2-135M
    assert (shares.pieces, shares.heads) == (2, 6)
    assert shares.share_of_keys.tolist() == [[0, 1], [2, NOTHING]]
    # Queries of one key in two unequal pieces.
    assert HeadShares(1, 5, 2).share_of_queries.tolist() == [[0, 1, 2], [3, 4, NOTHING]]


def test_entries_of_heads() -> None:
    assert of_entries(np.array([[0, 2], [1, NOTHING]]), 3).tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, -1, -1, -1]]
