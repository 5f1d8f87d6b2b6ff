"""Sets a request's slot up on the device, and changes it while the request runs.

Each function here calls a few small programs of fixed shapes, so ``warm_up`` compiles all there is. The state passed in
is donated. Only requests with ``RequestSampling.uses_slot`` need any of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from llmjax.sampling.rows import Feature, Floats, Ints, RequestSampling
from llmjax.sampling.state import (
    SamplerState,
    add_output_tokens,
    add_prompt_tokens,
    reset_slot,
    set_bans,
    set_bias,
)

CHUNK = 1024  # ids a call of a program

_reset_slot = jax.jit(reset_slot, donate_argnums=0)
_add_prompt_tokens = jax.jit(add_prompt_tokens, donate_argnums=0)
_add_output_tokens = jax.jit(add_output_tokens, donate_argnums=0)
_set_bias = jax.jit(set_bias, donate_argnums=0)
_set_bans = jax.jit(set_bans, donate_argnums=0)


def admit(
    state: SamplerState, slot: int, sampling: RequestSampling, *, prompt: Sequence[int], output: Sequence[int] = ()
) -> SamplerState:
    """Prepares the slot for a request that starts, or starts again after preemption.

    Args:
        state: donated.
        slot: in ``[0, num_slots)``.
        sampling: the request's.
        prompt: prompt ids.
        output: ids sampled so far.
    """
    state = _reset_slot(state, np.int32(slot), np.float32(sampling.bias_fill))
    if Feature.PENALTY in sampling.features:
        for ids in _chunks(np.asarray(prompt, np.int32), state.vocab_size):
            state = _add_prompt_tokens(state, np.int32(slot), ids)
        for ids in _chunks(np.asarray(output, np.int32), state.vocab_size):
            state = _add_output_tokens(state, np.int32(slot), ids)
    if Feature.BIAS in sampling.features:
        state = _write_bias(state, slot, sampling.bias_ids, sampling.bias_values)
        if len(output) < sampling.min_tokens:
            state = _write_bias(state, slot, sampling.stop_ids, np.full(len(sampling.stop_ids), -np.inf, np.float32))
    if Feature.BAN in sampling.features:
        state = write_bans(state, slot, sampling.bans([*prompt, *output][:-1]))
    return state


def lift_min_tokens(state: SamplerState, slot: int, sampling: RequestSampling) -> SamplerState:
    """Allows the stop ids again; due before the step that samples output number ``min_tokens`` (from 0)."""
    return _write_bias(state, slot, sampling.stop_ids, sampling.stop_values)


def write_bans(state: SamplerState, slot: int, bans: Sequence[tuple[int, int]]) -> SamplerState:
    """Replaces the slot's bans by ``bans`` (``RequestSampling.bans``); due whenever they changed.

    Raises:
        ValueError: more bans than the state has room for.
    """
    room = state.ban_token.shape[1]
    if len(bans) > room:
        raise ValueError(f"{len(bans)} bans, but the sampler state holds {room} a slot")
    table = np.full((room, 2), (-1, state.vocab_size), np.int32)
    if bans:
        table[: len(bans)] = bans
    return _set_bans(state, np.int32(slot), table[:, 0].copy(), table[:, 1].copy())


def warm_up(state: SamplerState) -> SamplerState:
    """Compiles every program of this module. Resets slot 0."""
    nothing = np.full(CHUNK, state.vocab_size, np.int32)
    zero = np.int32(0)
    state = _add_prompt_tokens(state, zero, nothing)
    state = _add_output_tokens(state, zero, nothing)
    state = _set_bias(state, zero, nothing, np.zeros(CHUNK, np.float32))
    state = write_bans(state, 0, ())
    return _reset_slot(state, zero, np.float32(0))


def _write_bias(state: SamplerState, slot: int, ids: Ints, values: Floats) -> SamplerState:
    chunks = zip(_chunks(ids, state.vocab_size), _chunks(values, 0), strict=True)
    for some_ids, some_values in chunks:
        state = _set_bias(state, np.int32(slot), some_ids, some_values)
    return state


def _chunks(values: np.ndarray, padding: int) -> Iterator[np.ndarray]:
    for start in range(0, len(values), CHUNK):
        chunk = values[start : start + CHUNK]
        yield np.pad(chunk, (0, CHUNK - len(chunk)), constant_values=padding)
