from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from llmjax.sampling.logprobs import no_logprobs, token_logprobs


def test_values_ranks_and_top() -> None:
    logits = np.random.default_rng(0).normal(size=(7, 50)).astype(np.float32) * 5
    targets = np.arange(7, dtype=np.int32) * 7
    got = token_logprobs(jnp.asarray(logits), jnp.asarray(targets), max_logprobs=4)
    expected = scipy.special.log_softmax(logits.astype(np.float64), axis=-1)
    np.testing.assert_allclose(got.logprob, expected[np.arange(7), targets], atol=1e-5)
    assert got.rank.tolist() == [int((row > row[t]).sum()) + 1 for row, t in zip(logits, targets, strict=True)]
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :4]
    assert np.array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(expected, order, -1), atol=1e-5)


def test_ties_share_a_rank_and_list_the_lower_id_first() -> None:
    got = token_logprobs(jnp.asarray([[1.0, 5.0, 5.0, 2.0]]), jnp.asarray([2]), max_logprobs=3)
    assert got.rank.tolist() == [1]
    assert got.top_ids.tolist() == [[1, 2, 3]]


def test_large_and_infinite_logits() -> None:
    got = token_logprobs(jnp.asarray([[1e30, -jnp.inf, 0.0]]), jnp.asarray([1]), max_logprobs=3)
    assert got.logprob.tolist() == [-np.inf]
    assert got.rank.tolist() == [3]
    assert got.top_logprobs[0, 0] == 0


def test_more_logprobs_than_tokens_are_marked_absent() -> None:
    got = token_logprobs(jnp.zeros((1, 2)), jnp.asarray([0]), max_logprobs=4)
    assert got.top_ids.tolist() == [[0, 1, -1, -1]]
    assert got.top_logprobs[0, 2:].tolist() == [-np.inf, -np.inf]


def test_none_has_the_same_shapes_and_dtypes() -> None:
    for count in (0, 3):
        some = token_logprobs(jnp.zeros((5, 9)), jnp.zeros(5, jnp.int32), max_logprobs=count)
        none = no_logprobs(5, max_logprobs=count)
        assert [(v.shape, v.dtype) for v in vars(some).values()] == [(v.shape, v.dtype) for v in vars(none).values()]


def test_no_other_array_has_the_size_of_the_logits() -> None:
    logits, targets = jax.ShapeDtypeStruct((32, 4096), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32)
    run = jax.jit(token_logprobs, static_argnames="max_logprobs").lower(logits, targets, max_logprobs=5).compile()
    assert run.memory_analysis().temp_size_in_bytes < 32 * 4096 * 4 / 2


def test_tokens_that_are_named() -> None:
    logits = np.random.default_rng(5).normal(size=(2, 9)).astype(np.float32)
    ids = np.array([[3, 8, 9], [0, 9, 9]], np.int32)  # 9: none
    got = token_logprobs(jnp.asarray(logits), jnp.asarray([1, 2]), max_logprobs=1, scored=jnp.asarray(ids))
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(got.scored[0], [expected[0, 3], expected[0, 8], -np.inf], atol=1e-5)
    np.testing.assert_allclose(got.scored[1], [expected[1, 0], -np.inf, -np.inf], atol=1e-5)
    assert token_logprobs(jnp.asarray(logits), jnp.asarray([1, 2]), max_logprobs=1).scored.shape == (2, 0)
