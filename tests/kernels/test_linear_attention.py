"""Linear attention with decay in XLA operations against the rule token by token, however tokens are cut into steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.loops import bounded_loops
from llmjax.kernels.recurrent.linear_attention import by_scan

GROUPS, HEADS, KEY, VALUE, TOKENS, PAGE, ENTRIES = 2, 6, 5, 7, 150, 96, 8
run = jax.jit(by_scan, static_argnames="page_size")


@pytest.fixture(scope="module")
def tokens() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal((TOKENS, GROUPS, KEY)) for _ in range(2))
    v, decay = rng.standard_normal((TOKENS, HEADS, VALUE)), -rng.exponential(0.3, (TOKENS, HEADS))
    decay[40:43] = -300.0  # everything is forgotten, and ratios of decays overflow
    return tuple(x.astype(np.float32) for x in (q, k, v, decay))


@pytest.fixture(scope="module")
def expected(tokens: tuple[np.ndarray, ...]) -> np.ndarray:
    q, k, v, decay = (x.astype(np.float64) for x in tokens)
    q, k = (np.repeat(x, HEADS // GROUPS, axis=1) for x in (q, k))
    state, out = np.zeros((HEADS, KEY, VALUE)), []
    for i in range(TOKENS):
        state = np.exp(decay[i])[:, None, None] * state + k[i][:, :, None] * v[i][:, None, :]
        out.append(np.einsum("hk,hkv->hv", q[i], state))
    return np.stack(out)


@pytest.mark.parametrize("cuts", [(150,), (1, 149), (64, 64, 22), (7, 1, 90, 1, 51), (63, 65, 22)])
def test_chunks_and_single_tokens(tokens: tuple[np.ndarray, ...], expected: np.ndarray, cuts: tuple[int, ...]) -> None:
    """A row of chunks beside a row of which each step has one token, over states that began as noise."""
    check(tokens, expected, cuts)


def test_loops_of_fixed_length(tokens: tuple[np.ndarray, ...], expected: np.ndarray) -> None:
    with bounded_loops(True):
        check(tokens, expected, (7, 1, 90, 1, 51))


def check(tokens: tuple[np.ndarray, ...], expected: np.ndarray, cuts: tuple[int, ...]) -> None:
    states, done, found, beside = jnp.full((ENTRIES, HEADS, KEY, VALUE), 9.0), 0, [], []
    tables = jnp.asarray([[3, 5], [6, 2]], jnp.int32)  # two pages of each row
    for step, count in enumerate(cuts):
        index = np.concatenate([np.arange(done, done + count), [step], np.zeros(160 - count, int)])
        batch = RaggedBatch(
            query_start=jnp.asarray([0, count, count + 1], jnp.int32),
            kv_len=jnp.asarray([done + count, step + 1], jnp.int32),
            page_table=tables,
            kv_index=jnp.zeros(161, jnp.int32),
        )
        read, states = run(*(x[index] for x in tokens), states, batch, page_size=PAGE)
        found.append(read[:count])
        beside.append(read[count])
        done += count
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(np.stack(beside), expected[: len(cuts)], rtol=0, atol=2e-5)
    # What stands in entry 0 and in those that no table names is not touched.
    np.testing.assert_array_equal(states[jnp.asarray([0, 1, 4, 7])], 9.0)
