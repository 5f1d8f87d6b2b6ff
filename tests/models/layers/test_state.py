"""What layers keep: a stack of arrays for each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.attention import KVPages
from llmjax.models.layers.state import LastState, LatentKV, PagedKV, Recurrent, make_stacks

F32 = jnp.dtype("float32")
FULL = PagedKV(kv_heads=2, head_dim=8)
WINDOW = PagedKV(kv_heads=2, head_dim=8, window=8)
RECURRENT = Recurrent(recent=(3, 5), memory=(2, 4, 4))
LATENT = LatentKV(dim=12, value_dim=8)
NUM_PAGES = {FULL.span: 6, WINDOW.span: 4, LastState(): 3}


def test_layers_of_one_kind_share_arrays() -> None:
    kinds = (WINDOW, FULL, WINDOW, RECURRENT, LATENT, RECURRENT)
    stacks = make_stacks(kinds, num_pages=NUM_PAGES, page_size=4, dtype=F32)
    assert [stack.layers for stack in stacks] == [(0, 2), (1,), (3, 5), (4,)]
    shapes = [leaf.shape for leaf in jax.tree.leaves(stacks)]
    assert shapes == [(8, 2, 2, 4, 8), (6, 2, 2, 4, 8), (6, 3, 5), (6, 2, 4, 4), (6, 1, 1, 4, 12)]
    assert [int(stacks[0].first_page(i)) for i in (0, 1)] == [0, 4]
    assert [int(stacks[2].first_page(i)) for i in (0, 1)] == [0, 3]


def test_layers_that_keep_nothing_have_no_pages() -> None:
    stacks = make_stacks((FULL, None, FULL, None), num_pages=NUM_PAGES, page_size=4, dtype=F32)
    assert [stack.layers for stack in stacks] == [(0, 2)] and len(jax.tree.leaves(stacks)[0]) == 12


@pytest.mark.parametrize(
    "layers_at_once,expected", [(5, [(0, 1, 2, 3, 4)]), (4, [(0, 1, 2), (3, 4)]), (0.5, [(i,) for i in range(5)])]
)
def test_no_array_is_larger_than_it_may_be(layers_at_once: float, expected: list[tuple[int, ...]]) -> None:
    most = int(layers_at_once * 6 * 2 * 2 * 4 * 8)
    stacks = make_stacks((FULL,) * 5, num_pages=NUM_PAGES, page_size=4, dtype=F32, max_elements=most)
    assert [stack.layers for stack in stacks] == expected
    assert all(len(stack.state.data) == 6 * len(stack.layers) for stack in stacks)  # type: ignore[union-attr]


def test_each_layer_has_its_own_calibration() -> None:
    scales = jnp.arange(12, dtype=jnp.float32).reshape(3, 2, 2)
    stacks = make_stacks(
        (WINDOW, FULL, WINDOW), num_pages=NUM_PAGES, page_size=4, dtype=jnp.dtype("int8"), calibration=scales
    )
    assert isinstance(stacks[0].state, KVPages)
    state = stacks[0].of(1)
    assert isinstance(state, KVPages) and state.calibration is not None
    np.testing.assert_array_equal(state.calibration, scales[2])
    after = stacks[0].after(state.with_data(state.data + 1))
    assert isinstance(after.state, KVPages) and after.state.calibration is not None
    np.testing.assert_array_equal(after.state.calibration, scales[jnp.array([0, 2])])
    assert int(after.state.data[-1].min()) == 1


@pytest.mark.parametrize("name", [pytest.param("gemma3", marks=pytest.mark.slow), "qwen3-next"])
def test_a_model_over_several_stacks_of_a_kind(name: str, golden: Callable[..., Any], stepper: Any) -> None:
    model = golden(name)
    case = next(iter(model.cases.values()))
    found = stepper(model.config, model.params, max_len=64)
    found.kv = make_stacks(
        found.config.states,
        num_pages=dict.fromkeys(found.config.spans, found.num_pages),
        page_size=found.kv[0].page_size,
        dtype=F32,
        max_elements=1,
    )
    assert len(found.kv) == found.config.num_layers
    request = found.add(case.tokens)
    half = len(case.tokens) // 2
    parts = [found.step([(request, count)], bucket=64, rows=2)[0] for count in (half, len(case.tokens) - half)]
    np.testing.assert_allclose(np.concatenate(parts)[case.at], case.logits, atol=2e-4)
