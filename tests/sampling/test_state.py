from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.sampling.state import (
    SamplerState,
    add_output_tokens,
    add_prompt_tokens,
    make_sampler_state,
    reset_slot,
    sampler_state_bytes,
    set_bans,
    set_bias,
)

S, V, M = 3, 11, 2
ONE = jnp.int32(1)


def fresh() -> SamplerState:
    return make_sampler_state(num_slots=S, vocab_size=V, max_bans=M)


def ids(*values: int) -> jnp.ndarray:
    """Padded with V, as the edits expect."""
    return jnp.asarray([*values, V, V], jnp.int32)


def edited() -> SamplerState:
    state = add_prompt_tokens(fresh(), ONE, ids(0, 4, 4, 10))
    state = add_output_tokens(state, ONE, ids(5, 5, 9))
    state = add_output_tokens(state, ONE, ids(5))
    state = set_bias(state, ONE, ids(3, 7), jnp.asarray([-jnp.inf, 2.5, 1.0, 1.0]))
    return set_bans(state, ONE, jnp.asarray([8, -1]), jnp.asarray([9, V]))


def test_edits_write_their_slot_and_drop_padding() -> None:
    state = edited()
    assert np.flatnonzero(state.prompt_seen[1]).tolist() == [0, 4, 10]
    assert np.array_equal(state.output_count[1], np.bincount([5, 5, 5, 9], minlength=V))
    assert state.logit_bias[1].tolist() == [0, 0, 0, -np.inf, 0, 0, 0, 2.5, 0, 0, 0]
    assert state.ban_previous[1].tolist() == [8, -1] and state.ban_token[1].tolist() == [9, V]
    for name, empty in vars(fresh()).items():
        for slot in (0, 2):
            assert np.array_equal(getattr(state, name)[slot], empty[slot])


def test_reset_forgets_the_slots_last_request() -> None:
    state = reset_slot(edited(), ONE, jnp.float32(0))
    for name, empty in vars(fresh()).items():
        assert np.array_equal(getattr(state, name), empty), name
    forbidding = reset_slot(edited(), ONE, jnp.float32(-jnp.inf))
    assert (np.asarray(forbidding.logit_bias[1]) == -np.inf).all() and not np.asarray(forbidding.logit_bias[0]).any()


def test_counts_saturate() -> None:
    many = jnp.full(40_000, 1, jnp.int32)
    state = add_output_tokens(add_output_tokens(fresh(), ONE, many), ONE, many)
    assert state.output_count[1, 1] == 65535 and state.output_count[0, 1] == 0


def test_sizes() -> None:
    assert (fresh().num_slots, fresh().vocab_size) == (S, V)


def test_its_size_is_known_before_it_is_made() -> None:
    arrays = jax.tree.leaves(make_sampler_state(num_slots=S, vocab_size=V, max_bans=M))
    assert sampler_state_bytes(num_slots=S, vocab_size=V, max_bans=M) == sum(array.nbytes for array in arrays)
