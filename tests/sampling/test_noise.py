from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from llmjax.sampling.noise import gumbel, row_keys

pytestmark = pytest.mark.jax_api


@partial(jax.jit, static_argnames="vocab")
def draw(seeds: jax.Array, positions: jax.Array, vocab: int) -> jax.Array:
    return gumbel(row_keys(seeds, positions), vocab)


def noise(seeds: list[tuple[int, int]], positions: list[int], vocab: int) -> np.ndarray:
    return np.asarray(draw(jnp.asarray(seeds, jnp.uint32), jnp.asarray(positions, jnp.int32), vocab))


def test_row_keys_are_jax_keys_folded_with_the_position() -> None:
    expected = jax.random.key_data(jax.random.fold_in(jax.random.key(1234), 56))
    assert np.array_equal(row_keys(jnp.asarray([[0, 1234]], jnp.uint32), jnp.asarray([56]))[0], expected)


def test_noise_is_gumbel_along_tokens_seeds_and_positions() -> None:
    n = 50_000
    along_tokens = noise([(0, 7)], [3], n)[0]
    along_seeds = noise([(0, i) for i in range(n)], [3] * n, 2)[:, 1]
    along_positions = noise([(0, 7)] * n, list(range(n)), 2)[:, 1]
    for values in (along_tokens, along_seeds, along_positions):
        assert scipy.stats.kstest(values, "gumbel_r").pvalue > 1e-3
    assert (
        max(abs(scipy.stats.spearmanr(a[:-1], a[1:])[0]) for a in (along_tokens, along_seeds, along_positions)) < 0.02
    )


def test_neighboring_rows_and_tokens_are_uncorrelated() -> None:
    rows = noise([(0, 1), (0, 2), (1, 1), (2**32 - 1, 1), (0, 1)], [0, 0, 0, 0, 1], 50_000)
    correlation = np.corrcoef(np.exp(-np.exp(-rows.astype(np.float64)))) - np.eye(5)
    assert np.abs(correlation).max() < 0.02


def test_the_winner_among_many_equal_tokens_is_uniform() -> None:
    """A 24-bit uniform would repeat its largest value here, and ties favor low ids."""
    vocab, rows = 1 << 16, 256
    winners = noise([(0, i) for i in range(rows)], [0] * rows, vocab).argmax(axis=1)
    assert scipy.stats.kstest(winners / vocab, "uniform").pvalue > 1e-3


def test_noise_is_finite_and_of_full_range() -> None:
    values = noise([(0, i) for i in range(16)], [0] * 16, 1 << 16)
    assert np.isfinite(values).all()
    assert values.max() > 12 and values.min() < -2.3


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_or_the_batch() -> None:
    wide = noise([(5, 6), (7, 8)], [1, 2], 1000)
    assert np.array_equal(noise([(7, 8)], [2], 10)[0], wide[1, :10])
